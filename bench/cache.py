"""The prompt cache measured, mlx-lm's `LRUPromptCache` beside it.

    python -m bench.cache [lookup] [clones] [eviction] [--trace FILE] [--quick] [--json FILE]

`lookup` searches among 10 to 100,000 entries, `clones` makes a thousand
clones of a 100 MB entry, `eviction` replays a block trace (a JSON line a request) and
generated workloads under LRU, the default policy and the clairvoyant optimum. Without names it runs
them all.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from bench import cache_clones, cache_index
from bench.cache_index import HitRates, LookupTimes
from bench.runner import Comparison, Machine, Report, machine, run

SECTIONS = ("lookup", "clones", "eviction")
LOOKUP_BAR = 0.5e-3
"""Seconds at the 99th percentile."""


class CacheReport(Struct, frozen=True, kw_only=True):
    """All figures of one run. Named tuples are written with their names."""

    machine: Machine
    lookups: list[dict[str, Any]]
    hit_rates: list[dict[str, Any]]
    comparisons: list[Comparison]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write JSON if asked to."""
    options = _options(arguments)
    console = Console()
    sections = options.sections or SECTIONS
    lookups: list[LookupTimes] = []
    rates: list[HitRates] = []
    comparisons: list[Comparison] = []
    if "lookup" in sections:
        lookups = list(cache_index.lookup_times(_entry_counts(options.quick)))
        console.print(_lookup_table(lookups))
        comparisons += [cache_index.page_jump(), cache_index.diverging_search()]
    if "clones" in sections:
        comparisons += cache_clones.comparisons(repeats=1 if options.quick else 3)
    settings: dict[str, Any] = {"sections": " ".join(sections), "quick": options.quick}
    Report(
        benchmark="prompt cache",
        machine=machine(),
        settings=settings,
        comparisons=tuple(comparisons),
    ).print(console)
    if "eviction" in sections:
        rates = _hit_rates(options, console)
        console.print(_eviction_table(rates))
    if options.json is not None:
        report = CacheReport(
            machine=machine(),
            lookups=[each._asdict() for each in lookups],
            hit_rates=[each._asdict() for each in rates],
            comparisons=comparisons,
        )
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.cache", description="Measure the cache.")
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], default=[])
    parser.add_argument("--trace", type=Path, help="a block trace: one JSON object a request")
    parser.add_argument("--quick", action="store_true", help="fewer entries, sizes and repeats")
    parser.add_argument("--json", type=Path, help="write all figures to a file")
    return parser.parse_args(arguments)


def _entry_counts(quick: bool) -> Sequence[int]:
    return cache_index.ENTRY_COUNTS[:3] if quick else cache_index.ENTRY_COUNTS


def _hit_rates(options: argparse.Namespace, console: Console) -> list[HitRates]:
    rates: list[HitRates] = []
    if options.trace is None:
        console.print("no --trace given: eviction is measured on generated workloads only")
    else:
        capacities = cache_index.TRACE_CAPACITIES
        rates += cache_index.trace_hit_rates(
            options.trace, capacities[1:2] if options.quick else capacities
        )
    rates += cache_index.workload_hit_rates(shares=(0.1,) if options.quick else (0.1, 0.3))
    return rates


def _lookup_table(lookups: Iterable[LookupTimes]) -> Table:
    table = _table(
        f"look-up of {cache_index.PROMPT_TOKENS:,} tokens given as a list, conversion included",
        ("entries", "median ms", "p99 ms", f"p99 / {LOOKUP_BAR * 1e3} ms", "index bytes a token"),
    )
    for each in lookups:
        table.add_row(
            f"{each.entries:,}",
            f"{each.median * 1e3:.3f}",
            f"{each.p99 * 1e3:.3f}",
            f"{each.p99 / LOOKUP_BAR:.2f}",
            f"{each.index_bytes / each.tokens:.3f}",
        )
    return table


def _eviction_table(rates: Iterable[HitRates]) -> Table:
    table = _table(
        "share of blocks that hit",
        ("workload", "blocks", "LRU", "default", "clairvoyant", "default / LRU", "hinted / best"),
    )
    for each in rates:
        hinted = f"{each.of_optimum:.3f}" if each.of_optimum is not None else ""
        table.add_row(
            each.workload,
            f"{each.capacity:,}",
            *(f"{rate:.4f}" for rate in (each.lru, each.default, each.clairvoyant)),
            f"{each.over_lru:.3f}",
            hinted,
        )
    return table


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "workload" else "right")
    return table


if __name__ == "__main__":
    run(main)
