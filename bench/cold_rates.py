"""Restore and write rates of the SSD store against raw sequential I/O of as many bytes."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from bench.cold_findings import RESTORE_BAR, Line
from bench.cold_store import flush, forget_pages, opened, random_caches
from bench.runner import Comparison, compare
from bench.swarm_findings import Bar
from bench.swarm_setup import Setup
from mlx_swarm.broker.cache.prefix_hash import as_tokens
from mlx_swarm.broker.cache.ssd.names import SUFFIX

CHUNK = 1 << 20


class RateSizes(NamedTuple):
    """Tokens of the sequence that is written and read."""

    tokens: int
    repeats: int = 5


def rates(setup: Setup, sizes: RateSizes, parent: Path) -> Iterator[Line]:
    """One sequence, read and written in turns with raw I/O."""
    tokens = as_tokens(range(sizes.tokens))
    caches = random_caches(setup.layout, sizes.tokens)
    with opened(parent) as (store, cache):
        cache.put(tokens, caches)
        flush(cache)
        (path,) = parent.glob(f"*/*/*{SUFFIX}")
        size, fresh = path.stat().st_size, forget_pages([path])
        match = store.find(tokens, "")
        assert match is not None

        def restore() -> float:
            forget_pages([path])
            start = time.perf_counter()
            store.restore(match)
            return size / (time.perf_counter() - start) / 1e9

        def read() -> float:
            forget_pages([path])
            return size / _read(path) / 1e9

        def load() -> float:
            forget_pages([path])
            start = time.perf_counter()
            mx.eval(mx.array(np.fromfile(path, np.uint8)))
            return size / (time.perf_counter() - start) / 1e9

        contenders = {"restore": restore, "read into a new array": load, "raw read": read}
        compared = compare(
            "restore, GB/s", contenders, unit="GB/s", higher_is_better=True, repeats=sizes.repeats
        )
        pages = "cold pages" if fresh else "pages may be cached"
        bar = Bar("restore over the raw read", compared.ratios[0].value, RESTORE_BAR, least=True)
        yield _line(f"restore {size / 1e6:,.0f} MB, {pages}", compared, (bar,))

        def write() -> float:
            cache.put(tokens, caches, f"{time.perf_counter_ns()}")
            start = time.perf_counter()
            flush(cache)
            seconds = time.perf_counter() - start
            cache.clear()
            return size / seconds / 1e9

        def raw_write() -> float:
            return size / _write(path.with_name("raw"), size) / 1e9

        compared = compare(
            "write, GB/s",
            {"write": write, "raw write": raw_write},
            unit="GB/s",
            higher_is_better=True,
            repeats=sizes.repeats,
        )
        yield _line(f"write {size / 1e6:,.0f} MB, synced", compared)


def _line(setting: str, compared: Comparison, bars: tuple[Bar, ...] = ()) -> Line:
    ours, raw = compared.figures[0], compared.figures[-1]
    ratio = compared.ratios[0]
    figures: dict[str, float | str] = {
        "GB/s": ours.median,
        "raw GB/s": raw.median,
        "ratio": ratio.value,
        "range": f"{ratio.low:.2f} to {ratio.high:.2f}",
    }
    if len(compared.figures) > 2:
        figures["into a new array GB/s"] = compared.figures[1].median
    return Line(part="rates", setting=setting, figures=figures, bars=bars, comparison=compared)


def _read(path: Path) -> float:
    """Seconds to read a file, always into the same memory."""
    memory = memoryview(bytearray(CHUNK))
    start = time.perf_counter()
    with open(path, "rb", buffering=0) as file:
        while file.readinto(memory):
            pass
    return time.perf_counter() - start


def _write(path: Path, size: int) -> float:
    """Seconds to write and sync a new file."""
    data = memoryview(np.random.default_rng(0).bytes(CHUNK))
    start = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for at in range(0, size, CHUNK):
            file.write(data[: min(CHUNK, size - at)])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds
