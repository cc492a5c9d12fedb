"""Decode steps while the store writes, and what many agents take on disk."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench.cold_findings import DECODE_BAR, DISK_BAR, Line
from bench.cold_store import extended, flush, opened, random_caches
from bench.runner import compare
from bench.swarm_decode import prefix_path, shared_steps, tail_lengths
from bench.swarm_findings import Bar
from bench.swarm_setup import Setup, supply
from mlx_swarm.broker.cache.ssd.names import SUFFIX


class DecodeSizes(NamedTuple):
    """Rows over a shared prefix, and `writes` sequences of `written` tokens each that are queued
    before the steps are timed.
    """

    rows: int
    shared: int
    tail: int
    steps: int
    written: int
    writes: int
    repeats: int = 5


class DiskSizes(NamedTuple):
    """Agents with a prefix in common."""

    agents: int
    shared: int
    own: int


def decode(setup: Setup, sizes: DecodeSizes, parent: Path) -> Iterator[Line]:
    """A decode step without and with write-behind; sequences that outlast the steps are queued."""
    tails = tail_lengths(sizes.rows, sizes.tail)
    path = prefix_path(setup, sizes.shared)
    measure = shared_steps(setup, [path] * sizes.rows, tails, sizes.steps)
    caches, tokens = random_caches(setup.layout, sizes.written), supply(setup, 3)
    lasted = []
    with opened(parent) as (store, cache):

        def writing() -> float:
            before = store.statistics().written_bytes
            for at in range(sizes.writes):
                cache.put(tokens.take(sizes.written), caches, f"{at}")
            cache.flush(0)
            milliseconds = measure()
            lasted.append(cache.flush(0).writes > 0)
            flush(cache)
            assert store.statistics().written_bytes > before
            cache.clear()
            return milliseconds

        compared = compare(
            "decode step",
            {"with write-behind": writing, "without": measure},
            unit="ms",
            repeats=sizes.repeats,
        )
    ours, usual = compared.figures
    yield Line(
        part="decode",
        setting=f"{sizes.rows} rows over {sizes.shared:,} tokens",
        figures={
            "ms": ours.median,
            "without ms": usual.median,
            "ratio of rates": usual.median / ours.median,
            "wrote to the end": f"{sum(lasted)} of {len(lasted)}",
        },
        bars=(
            Bar(
                "decode rate with write-behind", usual.median / ours.median, DECODE_BAR, least=True
            ),
        ),
        comparison=compared,
    )


def disk(setup: Setup, sizes: DiskSizes, parent: Path) -> Iterator[Line]:
    """Bytes of all files after every agent's whole sequence was put."""
    prompts = supply(setup, 4).prompts(sizes.agents, sizes.shared, sizes.own)
    prefix = random_caches(setup.layout, sizes.shared)
    with opened(parent) as (_, cache):
        cache.put(prompts[0][: sizes.shared], prefix)
        for prompt in prompts:
            own = random_caches(setup.layout, sizes.own)
            lease = cache.take(prompt)
            cache.put(prompt, extended(prefix, own), lease=lease)
            if lease is not None:
                lease.release()
        flush(cache)
        facts = [path.stat() for path in parent.glob(f"*/*/*{SUFFIX}")]
    needed = setup.kv_bytes(sizes.shared + sizes.agents * sizes.own)
    copies = setup.kv_bytes(sizes.agents * (sizes.shared + sizes.own))
    size = sum(each.st_size for each in facts)
    yield Line(
        part="disk",
        setting=f"{sizes.agents} x ({sizes.shared:,} + {sizes.own})",
        figures={
            "files": len(facts),
            "MB": size / 1e6,
            "MB allocated": sum(each.st_blocks for each in facts) * 512 / 1e6,
            "prefix + tails MB": needed / 1e6,
            "ratio": size / needed,
            "copies / ours": copies / size,
        },
        bars=(Bar("disk over one prefix and all tails", size / needed, DISK_BAR),),
    )
