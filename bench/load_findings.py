"""What the parts of `bench.load` find, as records in files and as lines and tables to be read."""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from bench.runner import Comparison
from bench.swarm_findings import GAP_BAR, Gap, Spread
from bench.swarm_records import Conditions
from bench.swarm_table import table

Cells = list[str]


class Policy(Struct, frozen=True, kw_only=True):
    """What came of all conversations under one policy, in its run of median length.

    `prefilled` and `ram` are tokens of prompts that were computed and that memory had; `turns` are
    seconds from a turn's question to the end of its reply; `fairness` is Jain's index of the
    sessions' times for a turn on average (1: all the same); `replaced` sessions lost their place.
    """

    name: str
    seconds: float
    prefilled: int
    ram: int
    turns: Spread
    fairness: float
    replaced: int


class Sessions(Struct, frozen=True, kw_only=True, tag=True):
    """Conversations whose working sets are `over` times what memory takes: policies compared by
    the seconds until all are over. `distinct` tokens have to be prefilled at least.
    """

    sessions: int
    turns: int
    over: float
    rows: int
    distinct: int
    comparison: Comparison
    policies: tuple[Policy, ...]

    TITLE = "Sessions beyond memory"
    COLUMNS = (
        "policy; prefilled tokens; over the least; from RAM; turn p50 s; p99 s; worst s; "
        "makespan s; over everybody at once; fairness; replaced"
    )

    def rows_of_table(self) -> Iterable[Cells]:
        """A row for each policy."""
        ratios = {ratio.contender: ratio for ratio in self.comparison.ratios}
        for each in self.policies:
            ratio = ratios.get(each.name)
            yield [
                f"{each.name}, {self.sessions} x {self.turns} turns, {self.over:g} x RAM, "
                f"{self.rows} rows",
                f"{each.prefilled:,}",
                f"{each.prefilled / self.distinct:.2f}",
                f"{each.ram / (each.ram + each.prefilled):.0%}",
                f"{each.turns.p50:.2f}",
                f"{each.turns.p99:.2f}",
                f"{each.turns.worst:.2f}",
                f"{each.seconds:.1f}",
                f"{ratio.value:.2f} ({ratio.verdict})" if ratio else "",
                f"{each.fairness:.2f}",
                f"{each.replaced}",
            ]


class Gaps(Struct, frozen=True, kw_only=True, tag=True):
    """How long running agents wait for a token while a long prompt is computed."""

    gap: Gap

    TITLE = "Running agents while a long prompt prefills"
    COLUMNS = "agents; prompt; step ms; longest gap ms; gap in steps; at most"

    def rows_of_table(self) -> Iterable[Cells]:
        """A row for each repeat."""
        for step, longest in zip(self.gap.steps, self.gap.gaps, strict=True):
            yield [
                f"{self.gap.agents}",
                f"{self.gap.prompt:,}",
                f"{step:.1f}",
                f"{longest:.1f}",
                f"{longest / step:.2f}",
                f"{GAP_BAR:g}",
            ]


class Asking(Struct, frozen=True, kw_only=True, tag=True):
    """A decode step by what its rows ask for, over one of rows that ask for nothing."""

    rows: int
    comparison: Comparison

    TITLE = "Grammars and penalties in a batch"
    COLUMNS = "rows; ask for; step ms; over none; more a row and token, us"

    def rows_of_table(self) -> Iterable[Cells]:
        """A row for each contender."""
        ratios = {ratio.contender: ratio for ratio in self.comparison.ratios}
        least = min(figure.median for figure in self.comparison.figures)
        for figure in self.comparison.figures:
            ratio = ratios.get(figure.contender)
            yield [
                f"{self.rows}",
                figure.contender,
                f"{figure.median:.2f}",
                f"{ratio.value:.2f} ({ratio.verdict})" if ratio else "",
                f"{1e3 * (figure.median - least) / self.rows:.0f}",
            ]


Finding = Sessions | Gaps | Asking
"""What any part finds."""

KINDS = (Sessions, Gaps, Asking)


class LoadRecord(Conditions, frozen=True, kw_only=True):
    """A finding and its conditions."""

    found: Finding


def lines(found: Finding) -> Iterable[str]:
    """A finding as lines to be read while others are still measured."""
    for row in found.rows_of_table():
        pairs = zip(found.COLUMNS.split("; "), row, strict=True)
        yield "; ".join(f"{name} {cell}".strip() for name, cell in pairs if cell)


def markdown(records: Sequence[LoadRecord]) -> str:
    """A page of everything, with the conditions on top."""
    if not records:
        return "No records.\n"
    dates = sorted({record.date for record in records})
    conditions = dict.fromkeys(
        f"`python -m bench.load` with {record.model}, {record.dtype}; attention: "
        f"{record.attention}; {record.machine}."
        for record in records
    )
    parts = [f"# Many agents on one box, {' and '.join(dates)}", *conditions]
    for kind in KINDS:
        found = [record.found for record in records if isinstance(record.found, kind)]
        if found:
            rows = [row for each in found for row in each.rows_of_table()]
            parts += [f"## {kind.TITLE}", table(kind.COLUMNS, rows)]
    return "\n\n".join(parts) + "\n"
