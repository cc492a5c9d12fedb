"""A cold tier without a disk: what it holds is an index, and reading and writing take time."""

from collections import deque
from collections.abc import Callable

from bench.block_replay import Block
from bench.simulate_kv import CountedRow
from bench.simulate_timeline import Timeline
from mlx_swarm.broker.cache.cold import ColdMatch, ColdWrite, Flushed, Restored
from mlx_swarm.broker.cache.eviction import LRU, EvictionQueue
from mlx_swarm.broker.cache.node import Node
from mlx_swarm.broker.cache.prefix_hash import Tokens
from mlx_swarm.broker.cache.statistics import ColdStatistics
from mlx_swarm.broker.cache.tree import PrefixTree
from mlx_swarm.broker.errors import CacheError, ColdStoreBusy, ColdStoreRefused


class SimulatedStore:
    """At most `max_tokens` tokens, of which the leaves that were used least recently go.

    One write at a time takes `seconds_for(tokens)`, in the order in which they came, of at most
    `queue_tokens` at a time. Whoever calls `restore` lets the time of that pass.
    """

    def __init__(
        self,
        max_tokens: int,
        *,
        timeline: Timeline,
        seconds_for: Callable[[int], float],
        queue_tokens: int,
    ) -> None:
        self.max_tokens = max_tokens
        self.losses = 0
        self.tokens = self.peak_tokens = 0
        self.writes = self.restores = self.evicted = 0
        self.written_tokens = self.restored_tokens = 0
        self._timeline = timeline
        self._seconds_for = seconds_for
        self._queue_tokens = queue_tokens
        self._order = EvictionQueue(LRU(), timeline)
        self._trees: dict[str, PrefixTree] = {}
        self._writes: deque[tuple[ColdWrite, int]] = deque()
        self._queued_tokens = 0
        self._reading: dict[str, Node] = {}

    def find(self, tokens: Tokens, namespace: str, held: int = 0) -> ColdMatch | None:
        """The longest prefix that is here, which may end anywhere."""
        walk = self._tree(namespace).walk(tokens)
        if not walk.length:
            return None
        start = min(held, walk.length)
        name = f"{namespace}/{walk.path[-1].tree.name(walk.path[-1])}"
        return ColdMatch(name=name, length=walk.length, bytes=walk.length - start, start=start)

    def covers(self, tokens: Tokens, namespace: str, is_usable: bool) -> bool:
        """Whether all of it is here."""
        return self._tree(namespace).walk(tokens).length == len(tokens)

    def begin(self, match: ColdMatch, tokens: Tokens, namespace: str) -> None:
        """Keep what a reading needs until it is over."""
        tree = self._tree(namespace)
        node = tree.walk(tokens[: match.length]).path[-1]
        tree.lease(node)
        tree.touch(node)
        self._reading[match.name] = node

    def restore(self, match: ColdMatch) -> Restored:
        """What was read since `begin`."""
        node = self._reading.pop(match.name, None)
        if node is None:
            raise CacheError(f"the reading of {match.name} was not begun")
        node.tree.release(node)
        self.restores += 1
        self.restored_tokens += match.bytes
        return Restored(CountedRow(match.length, match.start))

    def store(self, write: ColdWrite) -> None:
        """Queue what is not here yet."""
        new = len(write.tokens) - self._tree(write.namespace).walk(write.tokens).length
        if not new:
            write.done(None)
            return
        if new > self.max_tokens:
            raise ColdStoreRefused(f"{new:,} tokens exceed the cap of {self.max_tokens:,}")
        if self._writes and self._queued_tokens + new > self._queue_tokens:
            raise ColdStoreBusy(f"{self._queued_tokens:,} tokens wait to be written")
        self._writes.append((write, new))
        self._queued_tokens += new
        if len(self._writes) == 1:
            self._begin_write()

    def delete(self, match: ColdMatch) -> None:
        """Nothing here is ever unusable."""
        raise AssertionError(match)

    def flush(self, timeout: float) -> Flushed:
        """What is left to write."""
        return Flushed(len(self._writes), self._queued_tokens)

    def statistics(self) -> ColdStatistics:
        """Sizes and counts; bytes are tokens."""
        return ColdStatistics(
            files=sum(map(len, self._trees.values())),
            bytes=self.tokens,
            max_bytes=self.max_tokens,
            pending_writes=len(self._writes),
            pending_bytes=self._queued_tokens,
            restored_bytes=self.restored_tokens,
            written_bytes=self.written_tokens,
            writes=self.writes,
            restores=self.restores,
            evicted=self.evicted,
        )

    def check_integrity(self) -> None:
        """Assert that the sums are those of the index."""
        for tree in self._trees.values():
            tree.check_integrity()
        self._order.check_integrity()
        nodes = [node for tree in self._trees.values() for node in tree.nodes()]
        assert self.tokens == sum(map(len, nodes))
        assert self._queued_tokens == sum(new for _, new in self._writes)
        assert sum(node.leases for node in nodes) == len(self._reading)

    def _begin_write(self) -> None:
        seconds = self._seconds_for(self._writes[0][1])
        self._timeline.at(self._timeline.now + seconds, self._end_write)

    def _end_write(self) -> None:
        write, new = self._writes.popleft()
        self._queued_tokens -= new
        self._enter(write)
        if self._writes:
            self._begin_write()
        write.done(None)

    def _enter(self, write: ColdWrite) -> None:
        tree = self._tree(write.namespace)
        walk = tree.walk(write.tokens)
        start, stop = walk.length, len(write.tokens)
        if start < stop:
            node = tree.insert(write.tokens, Block(start, stop), walk=walk).node
            self.tokens += stop - start
            self.written_tokens += stop - start
            self.writes += 1
            tree.lease(node)
            self._make_room()
            tree.release(node)
            self.peak_tokens = max(self.peak_tokens, self.tokens)

    def _make_room(self) -> None:
        if self.tokens <= self.max_tokens:
            return
        for node in self._order.victims():
            node.tree.remove(node)
            self.tokens -= len(node)
            self.losses += 1
            self.evicted += 1
            if self.tokens <= self.max_tokens:
                return

    def _tree(self, namespace: str) -> PrefixTree:
        if namespace not in self._trees:
            tree = PrefixTree(namespace, clock=self._timeline, observer=self._order)
            self._trees[namespace] = tree
        return self._trees[namespace]
