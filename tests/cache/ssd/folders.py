"""Stores in folders of their own, and what the files in them say, read without the store."""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from io import FileIO
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_swarm.broker.cache.prompt_cache import PromptCache
from mlx_swarm.broker.cache.runs import intersect_runs
from mlx_swarm.broker.cache.ssd import SsdStore
from mlx_swarm.broker.cache.ssd.disk import Disk, Facts
from mlx_swarm.broker.cache.ssd.files import read_header
from mlx_swarm.broker.cache.ssd.header import Header
from mlx_swarm.broker.cache.ssd.names import QUARANTINE, SUFFIX, VERSION, key_of, namespace_key
from tests.cache.helpers import put

RAM = 1 << 20
CAP = 1 << 30
SECONDS = 30.0


def files(folder: Path) -> list[Path]:
    """The files of a store, in order of their names."""
    return sorted((folder / VERSION).glob(f"*{SUFFIX}"))


def quarantined(folder: Path) -> list[Path]:
    """The files that were put aside."""
    return sorted((folder / VERSION / QUARANTINE).glob("*"))


def headers(folder: Path) -> list[Header]:
    """What every file says of itself."""
    result = []
    for path in files(folder):
        key = key_of(path.name)
        assert key is not None
        with closing(Disk().open(path)) as file:
            result.append(read_header(Disk(), file, key, path.stat().st_size).header)
    return result


def store_all(
    folder: Path,
    sequences: Sequence[Sequence[int]],
    family: str = "full",
    namespace: str = "",
    model: str = "",
) -> None:
    """Have a store of its own write sequences, and close it."""
    with SsdStore(folder, CAP, model=model) as store:
        cache = PromptCache(RAM, cold=store)
        for tokens in sequences:
            put(cache, tokens, family, namespace)
        assert cache.flush(SECONDS) == (0, 0)
        store.check_integrity()


def longest(found: Sequence[Header], namespace: str, tokens: Sequence[int]) -> int:
    """The definition of `find`: every length of every chain of files is tried, longest first."""
    wanted = np.array(tokens, np.uint32)
    known = {header.key: header for header in found}
    whole = {}
    for header in found:
        path = _path(known, header, namespace)
        if path is not None:
            whole[header.key] = path
    best = 0
    for path in whole.values():
        for length in range(len(tokens), best, -1):
            if _serves(path, whole, length, wanted):
                best = length
                break
    return best


Part = tuple[Header, int, int]


def _path(known: dict[str, Header], header: Header, namespace: str) -> list[Part] | None:
    """The files from the root to this one, with the tokens each contributes."""
    parts: list[Part] = []
    stop = header.stop
    while True:
        if header.namespace != namespace_key(namespace):
            return None
        parts.insert(0, (header, header.start, stop))
        stop = header.start
        if header.parent == header.namespace:
            return parts if not stop else None
        parent = known.get(header.parent)
        if parent is None or not parent.start < stop <= parent.stop:
            return None
        header = parent


def _tokens(path: Sequence[Part]) -> Any:
    parts = [np.frombuffer(h.tokens, np.uint32)[a - h.start : b - h.start] for h, a, b in path]
    return np.concatenate(parts)


def _serves(path: Sequence[Part], whole: dict[str, list[Part]], length: int, wanted: Any) -> bool:
    tokens = _tokens(path)
    if len(tokens) < length or not np.array_equal(tokens[:length], wanted[:length]):
        return False
    layout = path[-1][0].layout
    for index, group in enumerate(layout.groups):
        held = {
            at
            for header, low, high in path
            for a, b in intersect_runs(header.runs[index], ((low, high),))
            for at in range(a, b)
        }
        if not all(held.issuperset(range(a, b)) for a, b in group.retention.needed(length)):
            return False
    if not layout.has_state:
        return True
    keys = {header.key for header, low, _ in path if low < length}
    return any(
        other[-1][0].has_checkpoint
        and other[-1][0].stop == length
        and (
            other[-1][0].key in keys
            or (other[-1][0].start == length and other[-1][0].parent in keys)
        )
        for other in whole.values()
    )


class FailingDisk(Disk):
    """A disk on which one kind of operation fails, or reads end early."""

    def __init__(self) -> None:
        self.failing: dict[str, OSError] = {}
        self.reads_at_most: int | None = None

    def open(self, path: Path) -> FileIO:
        self._check("open")
        return super().open(path)

    def create(self, path: Path) -> FileIO:
        self._check("create")
        return super().create(path)

    def read_into(self, file: FileIO, offset: int, buffer: memoryview) -> int:
        self._check("read")
        if self.reads_at_most is not None:
            buffer = buffer[: self.reads_at_most]
        return super().read_into(file, offset, buffer)

    def write(self, file: FileIO, data: memoryview) -> None:
        if "write" in self.failing:
            # As a full disk does: the first half still fits.
            super().write(file, data[: len(data) // 2])
        self._check("write")
        super().write(file, data)

    def sync(self, file: FileIO) -> None:
        self._check("sync")
        super().sync(file)

    def sync_folder(self, folder: Path) -> None:
        self._check("sync_folder")
        super().sync_folder(folder)

    def replace(self, source: Path, target: Path) -> None:
        self._check("replace")
        super().replace(source, target)

    def make_folder(self, folder: Path) -> None:
        self._check("make_folder")
        super().make_folder(folder)

    def open_lock(self, path: Path) -> int:
        self._check("lock")
        return super().open_lock(path)

    def entries(self, folder: Path) -> Iterator[Facts]:
        self._check("entries")
        return super().entries(folder)

    def _check(self, operation: str) -> None:
        if operation in self.failing:
            raise self.failing[operation]


def failure(code: int) -> OSError:
    """What the system says of an error."""
    return OSError(code, os.strerror(code))


def arrays(caches: Sequence[Any]) -> list[mx.array]:
    """Every array of stock caches, in order."""
    found: list[mx.array] = []

    def collect(item: Any) -> None:
        if isinstance(item, mx.array):
            found.append(item)
        elif isinstance(item, list | tuple):
            for each in item:
                collect(each)

    collect([cache.state for cache in caches])
    return found


def identical(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether stock caches hold the same bits, in the same types."""
    pairs = list(zip(arrays(left), arrays(right), strict=True))
    return all(a.dtype == b.dtype and a.shape == b.shape and _bits(a) == _bits(b) for a, b in pairs)


def _bits(array: mx.array) -> bytes:
    plain: Any = np.array(array.view(mx.uint8))
    return bytes(plain.tobytes())
