"""Opening a folder with very many files, and looking prompts up in it."""

import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from bench.cold_findings import LOOKUP_MILLISECONDS, OPEN_SECONDS, Line
from bench.cold_store import UNBOUNDED
from bench.swarm_findings import Bar
from bench.swarm_setup import Setup
from mlx_swarm.broker.cache.layout import Layout
from mlx_swarm.broker.cache.prefix_hash import Tokens
from mlx_swarm.broker.cache.ssd import SsdStore
from mlx_swarm.broker.cache.ssd.header import Header, encode
from mlx_swarm.broker.cache.ssd.names import VERSION, file_key, namespace_key, path_of

PREFIXES, PREFIX_TOKENS, OWN_TOKENS, MORE_TOKENS = 100, 64, 32, 1000


class IndexSizes(NamedTuple):
    """Files in the folder, and prompts looked up."""

    files: int
    lookups: int = 2000


def index(setup: Setup, sizes: IndexSizes, parent: Path) -> Iterator[Line]:
    """Files with real headers and holes for payloads: a hundred prefixes, all else below them."""
    with TemporaryDirectory(dir=parent) as folder:
        prefixes = _make(Path(folder), setup.layout, sizes.files)
        with SsdStore(Path(folder), UNBOUNDED) as store:
            assert store.statistics().files == sizes.files, store.statistics()
            # Closing writes the sidecar.
        _forget_sidecar(Path(folder))
        headers = _open(Path(folder), prefixes, 1)
        opened = _open(Path(folder), prefixes, sizes.lookups)
    p50, p99 = (opened.milliseconds[int(len(opened.milliseconds) * at)] for at in (0.5, 0.99))
    yield Line(
        part="index",
        setting=f"{sizes.files:,} files",
        figures={
            "open s": opened.seconds,
            "from headers s": headers.seconds,
            "look-up ms": p50,
            "p99 ms": p99,
        },
        bars=(
            Bar(f"opening {sizes.files:,} files, s", opened.seconds, OPEN_SECONDS),
            Bar("look-up, p99 ms", p99, LOOKUP_MILLISECONDS),
        ),
    )


class _Opened(NamedTuple):
    seconds: float
    milliseconds: list[float]


def _open(folder: Path, prefixes: list[Tokens], lookups: int) -> _Opened:
    start = time.perf_counter()
    with SsdStore(folder, UNBOUNDED) as store:
        seconds = time.perf_counter() - start
        generator, taken = np.random.default_rng(1), []
        for at in range(lookups):
            rest = generator.integers(0, 100_000, OWN_TOKENS + MORE_TOKENS, np.uint32)
            prompt = np.concatenate([prefixes[at % len(prefixes)], rest])
            # Without what other processes take meanwhile.
            start = time.thread_time()
            match = store.find(prompt, "")
            taken.append((time.thread_time() - start) * 1e3)
            assert match is not None
            assert match.length >= PREFIX_TOKENS
    return _Opened(seconds, sorted(taken))


def _forget_sidecar(folder: Path) -> None:
    for path in (folder / VERSION).glob("index*"):
        path.unlink()


def _make(folder: Path, layout: Layout, files: int) -> list[Tokens]:
    """Write the files; the prefixes that all hang on."""
    (folder / VERSION).mkdir()
    generator = np.random.default_rng(0)
    prefixes = list(
        generator.integers(0, 100_000, (min(PREFIXES, files), PREFIX_TOKENS), np.uint32)
    )
    root = namespace_key("")
    keys = [_file(folder, layout, tokens, 0, root) for tokens in prefixes]
    for at in range(files - len(prefixes)):
        prefix = prefixes[at % len(prefixes)]
        own = generator.integers(0, 100_000, OWN_TOKENS, np.uint32)
        tokens = np.concatenate([prefix, own])
        _file(folder, layout, tokens, PREFIX_TOKENS, keys[at % len(prefixes)])
    return prefixes


def _file(folder: Path, layout: Layout, tokens: Tokens, start: int, parent: str) -> str:
    key = file_key("", tokens, start)
    header = Header(
        key=key,
        parent=parent,
        namespace=namespace_key(""),
        start=start,
        stop=len(tokens),
        tokens=tokens[start:].tobytes(),
        layout=layout,
        runs=tuple(((start, len(tokens)),) for _ in layout.groups),
        has_checkpoint=False,
    )
    data = encode(header, [0] * header.block_count)
    with open(path_of(folder / VERSION, key), "wb", buffering=0) as file:
        file.write(data)
        file.truncate(len(data) + header.payload_bytes)
    return key
