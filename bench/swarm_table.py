"""The records of `bench.swarm` as Markdown: conditions, a table for each part, and the bars."""

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from bench.runner import Ratio
from bench.swarm_findings import (
    ARRIVAL_BAR,
    STOCK,
    Accuracy,
    Arrival,
    Bar,
    Clones,
    Found,
    Gap,
    Load,
    Memory,
    Overhead,
    Shares,
    Sharing,
    Spread,
    Steps,
    find_figure,
)
from bench.swarm_records import Record

Cells = list[str]


class Section(NamedTuple):
    """How records of one kind are shown: a title, columns parted by "; ", and a record's rows."""

    title: str
    columns: str
    rows: Callable[[Any], Iterable[Cells]]


def markdown(records: Sequence[Record]) -> str:
    """A page of everything, with the conditions on top and what each bar came to at the end."""
    if not records:
        return "No records.\n"
    dates = sorted({record.date for record in records})
    parts = [f"# Agents over one prefix, {' and '.join(dates)}"]
    conditions = dict.fromkeys(
        f"`python -m bench.swarm` with {record.model}, {record.dtype}; attention: "
        f"{record.attention}; {record.machine}"
        for record in records
    )
    parts += [f"{line}." for line in conditions]
    for kind, section in SECTIONS.items():
        found = [record.found for record in records if isinstance(record.found, kind)]
        if found:
            rows = [row for each in found for row in section.rows(each)]
            parts += [f"## {section.title}", table(section.columns, rows), *summary(found)]
    if bars := [_bar(bar) for record in records for bar in record.bars()]:
        parts += ["## Bars", table("figure; value; bar; verdict", bars)]
    return "\n\n".join(parts) + "\n"


def summary(found: Sequence[Found]) -> list[str]:
    """From how many rows on sharing pays, by the length of the one span that they share."""
    cells: dict[int, list[tuple[int, bool]]] = {}
    for each in found:
        if isinstance(each, Sharing) and each.groups == 1:
            pays = each.comparison.ratios[0].verdict == "better"
            cells.setdefault(each.span, []).append((each.rows, pays))
    said = []
    for span, rows in sorted(cells.items()):
        paying = takewhile(lambda cell: cell[1], sorted(rows, reverse=True))
        fewest = min((count for count, _ in paying), default=None)
        said.append(f"{span:,} tokens: {'never' if fewest is None else f'{fewest} rows'}")
    return [f"Sharing one span pays from these rows on. {'; '.join(said)}."] if said else []


def lines(record: Record) -> Iterable[str]:
    """A record as lines to be read while others are still measured."""
    section = SECTIONS[type(record.found)]
    for row in section.rows(record.found):
        pairs = zip(section.columns.split("; "), row, strict=True)
        yield "; ".join(f"{name} {cell}".strip() for name, cell in pairs if cell)
    for bar in record.bars():
        yield f"  {bar}"


def table(columns: str, rows: Iterable[Cells]) -> str:
    """A Markdown table."""
    names = columns.split("; ")
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _bar(bar: Bar) -> Cells:
    sign = "at least" if bar.least else "at most"
    return [bar.what, f"{bar.value:.3f}", f"{sign} {bar.limit:g}", "met" if bar.met else "MISSED"]


def _accuracy(found: Accuracy) -> Iterable[Cells]:
    for deviation, ours, stock in zip(found.deviations, found.ours, found.stock, strict=True):
        yield [found.served, f"{deviation:g}", f"{ours:.2g}", f"{stock:.2g}"]


def _steps(found: Steps) -> Iterable[Cells]:
    stock = find_figure(found.comparison, STOCK)
    assert stock is not None
    ratios = {ratio.contender: ratio for ratio in found.comparison.ratios}
    for shared in found.prefixes:
        ours, plain, theirs = (found.figure(w, shared) for w in ("shared", "plain", "mlx-lm"))
        assert ours is not None
        yield [
            f"{found.rows}",
            f"{shared:,}",
            f"{stock.median:.2f}",
            f"{ours.median:.2f}",
            _ratio(ratios[ours.contender]),
            f"{plain.median:.2f} ({plain.median / stock.median:.2f})" if plain else "",
            f"{theirs.median:.1f} ({theirs.median / ours.median:.1f} x ours)" if theirs else "",
        ]


def _arrival(found: Arrival) -> Iterable[Cells]:
    bar = ARRIVAL_BAR * found.bar_seconds
    seconds = (found.first, found.median, found.last, bar, found.total)
    yield [
        f"{found.system}, {found.variant}",
        f"{found.agents} x ({found.shared:,} + {found.own}), {found.generated} out",
        *(f"{each:.2f}" for each in seconds),
        _shares(found.shares) if found.shares else "",
        f"{found.rate:,.0f}",
        f"{found.decode_rate:,.0f}" if found.decode_rate else "never all",
        f"{found.computed:,} of {found.distinct:,}",
        *_memory(found.memory),
    ]


def _shares(shares: Shares) -> str:
    prefill = f"{shares.prefill:.2f} ({shares.chunks} chunks)"
    return f"{prefill} + {shares.decode:.2f} ({shares.steps} steps) + {shares.rest:.2f}"


def _load(found: Load) -> Iterable[Cells]:
    yield [
        found.system,
        f"{found.agents} of {found.sets} sets, {found.arrivals_a_second:.3g} a second",
        _spread(found.first_tokens, 1),
        _spread(found.gaps, 1000),
        f"{found.total:.1f}",
        f"{found.generated / found.total:,.0f}",
        f"{found.prompt_tokens:,}",
        f"{found.distinct:,}",
        f"{found.computed:,}",
        _size(found.peak_bytes),
    ]


def _overhead(found: Overhead) -> Iterable[Cells]:
    broker, bare = found.comparison.figures
    yield [
        f"{found.rows} x ({found.shared:,} + {found.own}), {found.generated} out",
        f"{broker.median:,.0f}",
        f"{bare.median:,.0f}",
        _ratio(found.comparison.ratios[0], 3),
    ]


def _gap(found: Gap) -> Iterable[Cells]:
    for step, gap, seconds in zip(found.steps, found.gaps, found.prefill_seconds, strict=True):
        setting = f"{found.agents} agents, {found.prompt:,} tokens"
        yield [setting, f"{step:.1f}", f"{gap:.1f}", f"{gap / step:.2f}", f"{seconds:.2f}"]


def _clones(found: Clones) -> Iterable[Cells]:
    yield [
        f"{found.agents} x ({found.shared:,} + {found.own})",
        f"{_size(found.prefix)} of {_size(found.prefix_copy)}",
        _size(found.own_copy),
        *_memory(found.memory),
    ]


def _sharing(found: Sharing) -> Iterable[Cells]:
    shared, copied = found.comparison.figures
    ratio = found.comparison.ratios[0]
    yield [
        f"{found.rows}",
        f"{found.groups}",
        f"{found.span:,}",
        f"{shared.median:.2f}",
        f"{copied.median:.2f}",
        _ratio(ratio),
        {"better": "pays", "worse": "costs"}.get(ratio.verdict, "alike"),
    ]


def _ratio(ratio: Ratio, places: int = 2) -> str:
    low, value, high = (f"{at:.{places}f}" for at in (ratio.low, ratio.value, ratio.high))
    return f"{value} ({low} to {high})"


def _spread(spread: Spread, scale: float) -> str:
    values = (spread.p50, spread.p95, spread.p99, spread.worst)
    return " / ".join(f"{scale * value:.3g}" for value in values)


def _memory(memory: Memory) -> Cells:
    taken = [_size(memory.peak), _size(memory.running)]
    if not memory.ledger:
        return [*taken, "", "", "", "", ""]
    tails = f"{_size(memory.tails)} ({_size(memory.used_tails)} filled)"
    sizes = (memory.extents, memory.workspace, memory.transients)
    extents, workspace, transients = map(_size, sizes)
    ledger = ", ".join(f"{name} {_size(n)}" for name, n in memory.ledger.items())
    return [*taken, extents, tails, workspace, transients, ledger]


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


MEMORY = "peak above before; running; extents; tails; workspace; transients; ledger"
SECTIONS: dict[type, Section] = {
    Accuracy: Section(
        "Worst row's error against float32 attention",
        "served by; deviation of logits; ours; stock",
        _accuracy,
    ),
    Steps: Section(
        "Decode step, ms, over the stock step of as many rows without a prefix",
        "rows; shared; stock; ours; ratio (range); plain (ratio); mlx-lm",
        _steps,
    ),
    Arrival: Section(
        "Agents at once, seconds to their first tokens",
        "; agents; first; median; last; bar; total; "
        "the last: prefill + decode + rest; tokens/s; while all decode; "
        f"computed of distinct; {MEMORY}",
        _arrival,
    ),
    Load: Section(
        "Mixed load (50th, 95th, 99th percentile / worst)",
        "; agents; first token, s; between tokens, ms; total, s; tokens/s; prompt tokens; "
        "distinct; computed; peak above before",
        _load,
    ),
    Overhead: Section(
        "Tokens a second while all rows decode",
        "rows; broker; bare loop; ratio (range)",
        _overhead,
    ),
    Gap: Section(
        "Between tokens of running agents while a prompt prefills, ms",
        "; median step without; longest gap; ratio; seconds to its first token",
        _gap,
    ),
    Clones: Section(
        "KV of running clones",
        f"clones; prefix, of one copy; own prompts, one copy; {MEMORY}",
        _clones,
    ),
    Sharing: Section(
        "Step with spans shared, ms, over the same tokens copied into the tails",
        "rows; groups; span; shared; copied; ratio (range); sharing",
        _sharing,
    ),
}
