"""What `bench.cold` finds: lines with figures, the bars they are held to, and tables of them."""

from collections.abc import Iterable, Iterator
from itertools import groupby

from msgspec import Struct

from bench.runner import Comparison, Machine
from bench.swarm_findings import Bar

RESTORE_BAR, GATE_BAR, DECODE_BAR, DISK_BAR = 0.8, 1.1, 0.98, 1.05
OPEN_SECONDS, LOOKUP_MILLISECONDS = 3.0, 0.5


class Line(Struct, frozen=True, kw_only=True):
    """One setting of a part: figures by name (the unit is in the name), what they have to reach,
    and the comparison that they come from, if any.
    """

    part: str
    setting: str
    figures: dict[str, float | str]
    bars: tuple[Bar, ...] = ()
    comparison: Comparison | None = None


class Record(Struct, frozen=True, kw_only=True):
    """A line and its conditions; `load` is the machine's while it was measured."""

    date: str
    machine: Machine
    model: str
    dtype: str
    load: float
    line: Line


def markdown(lines: Iterable[Line]) -> str:
    """A table for each part, and the bars."""
    every = list(lines)
    text = [part for _, group in groupby(every, lambda each: each.part) for part in _table(group)]
    bars = [f"- {bar}" for each in every for bar in each.bars]
    return "\n".join([*text, "## Bars", "", *bars, ""])


def told(line: Line) -> str:
    """A line for the terminal."""
    figures = ", ".join(f"{name} {_shown(value)}" for name, value in line.figures.items())
    return f"{line.part}, {line.setting}: {figures}"


def _table(group: Iterator[Line]) -> Iterable[str]:
    lines = list(group)
    heads = list(dict.fromkeys(name for line in lines for name in line.figures))
    yield f"## {lines[0].part}"
    yield ""
    yield _row(["", *heads])
    yield _row(["---", *("---:" for _ in heads)])
    for line in lines:
        yield _row([line.setting, *(_shown(line.figures.get(head, "")) for head in heads)])
    yield ""


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.4g}"
