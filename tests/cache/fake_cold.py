"""A cold store in memory that can be slow, broken or full, and sinks that can be broken too."""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mlx_swarm.broker.cache.cold import ColdMatch, ColdWrite, Flushed, Restored
from mlx_swarm.broker.cache.kinds import materialise
from mlx_swarm.broker.cache.plan import Lease
from mlx_swarm.broker.cache.statistics import ColdStatistics
from tests.cache.rows import Array


class Stored(NamedTuple):
    """A sequence in the store: stock caches of its own."""

    namespace: str
    tokens: Array
    caches: list[Any]


class FakeColdStore:
    """Sequences in a dictionary. With `is_slow`, writes wait for `finish`."""

    def __init__(self, *, is_slow: bool = False) -> None:
        self.is_slow = is_slow
        self.is_full = False
        self.is_refusing = False
        self.unreadable: set[str] = set()
        self.entries: dict[str, Stored] = {}
        self.offered = 0
        self.queue: list[ColdWrite] = []
        self.restored: list[str] = []
        self.read: list[str] = []
        self.deleted: list[str] = []
        self.released: list[str] = []
        self.losses = 0

    def find(self, tokens: Array, namespace: str, held: int = 0) -> ColdMatch | None:
        best = None
        for name, entry in self.entries.items():
            size = len(entry.tokens)
            fits = entry.namespace == namespace and size <= len(tokens)
            if fits and np.array_equal(entry.tokens, tokens[:size]):
                if best is None or size > best.length:
                    nbytes = sum(cache.nbytes for cache in entry.caches)
                    best = ColdMatch(name=name, length=size, bytes=nbytes)
        return best

    def covers(self, tokens: Array, namespace: str, is_usable: bool) -> bool:
        return any(
            entry.namespace == namespace and np.array_equal(entry.tokens[: len(tokens)], tokens)
            for entry in self.entries.values()
        )

    def restore(self, match: ColdMatch) -> Restored:
        self.restored.append(match.name)
        if match.name in self.unreadable:
            raise OSError(f"{match.name} is corrupt")
        caches = copy.deepcopy(self.entries[match.name].caches)
        self.read.append(match.name)
        return Restored(caches, lambda: self.released.append(match.name))

    def store(self, write: ColdWrite) -> None:
        if self.is_refusing:
            raise OSError("not now")
        self.offered += 1
        self.queue.append(write)
        if not self.is_slow:
            self.finish()

    def delete(self, match: ColdMatch) -> None:
        self.deleted.append(match.name)
        self.entries.pop(match.name, None)

    def flush(self, timeout: float) -> Flushed:
        self.finish()
        return Flushed(0, 0)

    def statistics(self) -> ColdStatistics:
        return ColdStatistics(files=len(self.entries))

    def finish(self, count: int | None = None) -> None:
        """End the oldest writes: well, or badly when the store is full."""
        ending, self.queue = self.queue[:count], self.queue[len(self.queue[:count]) :]
        for write in ending:
            if self.is_full:
                write.done(OSError("disk full"))
                continue
            name = f"{write.namespace}/{write.tokens.tobytes().hex()}"
            caches = materialise(write.lease.caches)
            self.entries[name] = Stored(write.namespace, write.tokens.copy(), caches)
            write.done(None)

    def add(self, namespace: str, tokens: Sequence[int], caches: list[Any]) -> str:
        """Have a sequence that was never written."""
        key = np.array(tokens, dtype=np.uint32)
        name = f"{namespace}/{key.tobytes().hex()}"
        self.entries[name] = Stored(namespace, key, caches)
        return name


class OwnedSink:
    """Keeps the leases it is given, or raises."""

    def __init__(self) -> None:
        self.leases: list[Lease] = []
        self.is_broken = False

    def spill_owned(self, lease: Lease, namespace: str) -> None:
        if self.is_broken:
            raise OSError("sink is broken")
        self.leases.append(lease)


class SyncSink:
    """Copies what it is shown, or raises."""

    def __init__(self) -> None:
        self.seen: list[Stored] = []
        self.is_broken = False

    def spill_sync(self, tokens: Array, caches: Sequence[Any], namespace: str) -> None:
        if self.is_broken:
            raise OSError("sink is broken")
        self.seen.append(Stored(namespace, np.array(tokens), materialise(caches)))
