"""A prompt cache beside the oracle, driven one random step at a time, compared after each."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import mlx.core as mx
import numpy as np

from mlx_swarm.broker.cache import naming, prefix_hash, reasons
from mlx_swarm.broker.cache.clones import ChunkedClone
from mlx_swarm.broker.cache.cold import ColdMatch
from mlx_swarm.broker.cache.extents import Extent, ExtentRange
from mlx_swarm.broker.cache.kinds import layout_of, materialise
from mlx_swarm.broker.cache.layout import Layout, TokenLeaf
from mlx_swarm.broker.cache.lease import PromptLease
from mlx_swarm.broker.cache.node import Node
from mlx_swarm.broker.cache.prompt_cache import PromptCache
from mlx_swarm.broker.errors import CacheError
from mlx_swarm.broker.trace.events import Demoted, Event, Evicted
from tests.cache.fake_cold import FakeColdStore, OwnedSink, SyncSink
from tests.cache.oracle import LinearPromptCache, Lost, Resident
from tests.cache.rows import (
    STATEFUL,
    Array,
    Content,
    Rows,
    advance,
    build,
    contents,
    logprobs_of,
    same,
)


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def constant_hashes() -> Iterator[None]:
    """Every hash and every name collides."""
    with (
        patch.object(prefix_hash, "sha256_digest", lambda data: bytes(32)),
        patch.object(naming, "sha256_digest", lambda data: bytes(32)),
        patch.object(reasons, "_key", lambda *_: 0),
    ):
        yield


class Running(NamedTuple):
    """A lease in use: its namespace, all tokens its caches hold by now, the caches."""

    lease: PromptLease
    namespace: str
    tokens: list[int]
    caches: list[Any]


class World:
    """One namespace for each cache family, one budget for all."""

    def __init__(
        self,
        families: Sequence[str],
        max_bytes: int,
        cold: FakeColdStore | None = None,
        sink: OwnedSink | SyncSink | None = None,
    ) -> None:
        self.clock = Clock()
        self.cold = cold
        self.sink = sink
        self.cache = PromptCache(max_bytes, clock=self.clock, cold=cold, spill=sink, trace=self)
        self.oracle = LinearPromptCache()
        self.families = list(families)
        self.running: list[Running] = []
        self._dropped = 0
        self._evicted = 0

    def now(self) -> float:
        """The world is the cache's trace."""
        return self.clock.now

    def emit(self, event: Event) -> None:
        """Forget what is evicted when it is, not after the step: it may come back within it."""
        if isinstance(event, Evicted | Demoted):
            self._evicted += 1
            self._forget_evicted()

    def put(
        self, family: str, tokens: Sequence[int], chunk: int = 5, known: Sequence[bool] = ()
    ) -> None:
        """Compute a sequence from nothing and store it; `known`, over and over, says which tokens'
        log-probabilities come along.
        """
        self._store(family, tokens, build(family, tokens, chunk), known=known)

    def take(self, family: str, tokens: Sequence[int], alternatives: int | None = None) -> None:
        """Take a prompt, compare length and bytes, keep the lease."""
        plan = self.cache.plan(tokens, family, alternatives)
        in_ram = self.oracle.usable(tokens, family, alternatives)
        assert plan.ram_tokens == in_ram, (family, tokens, plan, in_ram)
        assert in_ram == self.cache.peek_prefix_len(tokens, family, alternatives)
        assert plan.reason is not None or plan.to_prefill == 1
        assert alternatives is None or not plan.cold_tokens
        match = self._cold_match(family, tokens) if plan.cold_tokens else None
        restores = self._restores()
        lease = self.cache.take(tokens, family, alternatives)
        length = lease.length if lease is not None else 0
        if match is not None:
            self._restored(family, match, self._restores() > restores)
            in_ram = self.oracle.usable(tokens, family)
        assert length == in_ram, (family, tokens, length, in_ram)
        if lease is not None:
            assert length == lease.ram_tokens + lease.cold_tokens
            if alternatives is not None:
                assert np.array_equal(lease.logprobs, logprobs_of(tokens)[: length + 1])  # type: ignore[arg-type]
            self._compare(family, tokens[:length], lease.caches)
            self.running.append(Running(lease, family, list(tokens[:length]), lease.caches))
        self.check()

    def step(self, index: int, new_tokens: Sequence[int]) -> None:
        """Decode on a clone; neither donors nor other clones may change."""
        running = self.running[index]
        before = self.checksum()
        start = len(running.tokens)
        running.tokens.extend(new_tokens)
        advance(running.caches, running.tokens, start)
        mx.eval([cache.state for cache in materialise(running.caches)])
        self._compare(running.namespace, running.tokens, running.caches)
        assert self.checksum() == before

    def trim(self, index: int, count: int) -> None:
        """Cut tokens off a clone's end, if all its layers can."""
        running = self.running[index]
        count = min(count, len(running.tokens) - 1)
        if count < 1 or not _can_trim(running.caches, len(running.tokens) - count):
            return
        before = self.checksum()
        for cache in running.caches:
            assert cache.trim(count) == count
        del running.tokens[len(running.tokens) - count :]
        self._compare(running.namespace, running.tokens, running.caches)
        assert self.checksum() == before

    def put_running(self, index: int, known: Sequence[bool] = ()) -> None:
        """Store what a clone holds by now."""
        running = self.running[index]
        lease = running.lease
        fits = running.tokens[: lease.length] == lease.tokens.tolist()
        lent = lease if fits else None
        self._store(running.namespace, running.tokens, running.caches, lent, known)

    def release(self, index: int) -> None:
        """End a clone, twice."""
        lease = self.running.pop(index).lease
        lease.release()
        lease.release()
        self.check_cap()
        self.check()

    def pin(self, family: str, tokens: Sequence[int], ttl: float) -> None:
        """Pin what is stored of a sequence, within the cap."""
        try:
            self.cache.pin(tokens, family, ttl)
        except CacheError as error:
            assert "pinned" in str(error)  # noqa: PT017
        self.check()

    def empty_sink(self) -> None:
        """Dispose of what the sink was given, after a look at it."""
        if isinstance(self.sink, OwnedSink):
            for lease in self.sink.leases:
                assert isinstance(lease, PromptLease)
                self._compare(lease.namespace, lease.tokens.tolist(), lease.caches)
                lease.release()
            self.sink.leases.clear()
        elif isinstance(self.sink, SyncSink):
            for namespace, tokens, caches in self.sink.seen:
                self._compare(namespace, tokens.tolist(), caches)
            self.sink.seen.clear()

    def clear(self, family: str | None) -> None:
        """Forget a namespace, or all."""
        self.cache.clear(family)
        self.oracle.clear(family)
        self.check()

    def demote(self, idle: float) -> None:
        """Demote idle leaves, finishing slow writes."""
        self.cache.demote_idle(idle)
        if self.cold is not None:
            self.cold.finish()
            self.cache.demote_idle(idle)
        self.check()

    def check(self) -> None:
        """Everything that must hold between two steps."""
        self.cache.check_integrity()
        for family in self.families:
            self._check_logprobs(family)
        lost = self._forget_evicted()
        assert not lost.tokens, lost
        if lost.states:
            total = self.cache.statistics().total
            assert total.checkpoints_dropped > self._dropped, lost
            self._dropped = total.checkpoints_dropped

    def check_cap(self) -> None:
        """Only what may not be evicted now exceeds the budget; the figures agree."""
        statistics = self.cache.statistics()
        total = statistics.total
        kept = total.leased_bytes + total.pinned_bytes + total.undurable_bytes
        held = self.cache.total_bytes - statistics.departing_bytes
        assert held <= max(self.cache.max_bytes, kept)
        assert total.total_bytes == self.cache.total_bytes
        assert total.checkpoint_bytes <= self.cache.max_bytes
        assert statistics.leases >= len(self.running)

    def finish(self) -> None:
        """End everything: no lease and no byte may be left."""
        while self.running:
            self.release(0)
        while self.cold is not None and self.cold.queue:
            self.cold.finish()
            self.cache.demote_idle(1e9)
        self.empty_sink()
        self.clear(None)
        assert self.cache.total_bytes == 0
        if self.cold is not None:
            assert sorted(self.cold.released) == sorted(self.cold.read)
        assert self.cache.statistics().leases == 0

    def checksum(self) -> int:
        """A number over every byte of KV that the cache holds."""
        total = 0
        for family in self.families:
            for node in self.cache.tree(family).nodes():
                if isinstance(node.span, ExtentRange):
                    total ^= hash((node.start, _bytes(node.span.extent)))
                if node.checkpoint is not None:
                    total ^= hash(tuple(np.array(b).tobytes() for b in node.checkpoint.buffers))
        return total

    def _store(
        self,
        family: str,
        tokens: Sequence[int],
        caches: list[Any],
        lease: PromptLease | None = None,
        known: Sequence[bool] = (),
    ) -> None:
        before, logprobs = self._evicted, None
        if known:
            logprobs = logprobs_of(tokens)
            logprobs[~np.resize(np.array(known), len(tokens))] = np.nan
        stored = self.cache.put(tokens, caches, family, lease, logprobs)
        if stored.stored:
            kept = logprobs if self._were_kept(family, tokens, logprobs) else None
            self.oracle.put(tokens, caches, family, logprobs=kept)
        if self._evicted > before:
            # The new entry itself may be cold by now.
            self._forget_evicted()
        self.check_cap()
        self.check()

    def _were_kept(self, family: str, tokens: Sequence[int], logprobs: Array | None) -> bool:
        """Whether those that came with a put are there: all, unless there was no room for them."""
        if logprobs is None:
            return False
        walk = self.cache.tree(family).walk(tokens)
        held = np.concatenate([_logprobs(node) for node in walk.path] or [logprobs[:0]])
        held = held[: walk.length]
        lacking = np.isnan(held) & ~np.isnan(logprobs[: len(held)])
        assert not lacking.any() or self.cache.max_bytes < 1 << 20
        return not lacking.any()

    def _check_logprobs(self, family: str) -> None:
        """Those that are stored are those of the tokens they are stored with."""
        tree = self.cache.tree(family)
        for node in tree.nodes():
            held, tokens = _logprobs(node), tree.tokens_of(node)
            is_known = ~np.isnan(held)
            assert np.array_equal(
                held[is_known], logprobs_of(tokens.tolist())[node.start :][is_known]
            )
            known = self.oracle.known_logprobs(tokens.tolist(), family)[node.start :]
            assert np.array_equal(is_known, known), (family, node)

    def _cold_match(self, family: str, tokens: Sequence[int]) -> ColdMatch:
        """What a plan wants restored."""
        assert self.cold is not None
        match = self.cold.find(np.array(tokens[:-1], dtype=np.uint32), family)
        assert match is not None
        assert match.length > self.oracle.usable(tokens, family)
        return match

    def _restores(self) -> int:
        return self.cache.statistics().total.restores

    def _restored(self, family: str, match: ColdMatch, is_promoted: bool) -> None:
        """Tell the oracle what a restore brought, as far as it is still there."""
        assert self.cold is not None
        entry = self.cold.entries.get(match.name)
        if entry is None:
            assert match.name in self.cold.deleted
            return
        if not is_promoted:
            return
        self.oracle.put(entry.tokens.tolist(), entry.caches, family)
        self._forget_evicted()

    def _compare(self, family: str, tokens: Sequence[int], caches: list[Any]) -> None:
        length = len(tokens)
        found = contents(materialise(caches))
        assert _is_whole(found, layout_of(caches), length), (family, length)
        computed = contents(build(family, tokens))
        assert all(same(a, b) for a, b in zip(found, computed, strict=True)), (family, length)
        if self.oracle.usable([*tokens, 0], family) == length:
            key = np.array(tokens, dtype=np.uint32)
            known = self.oracle.layers(key, length, family)
            assert all(same(a, b) for a, b in zip(found, known, strict=True)), (family, length)

    def _forget_evicted(self) -> Lost:
        """Tell the oracle what is left; what it had to forget."""
        lost = Lost(0, 0)
        for family in self.families:
            tokens, states = self.oracle.retain(family, resident(self.cache, family))
            lost = Lost(lost.tokens + tokens, lost.states + states * (family in STATEFUL))
        return lost


def resident(cache: PromptCache, namespace: str) -> list[Resident]:
    """What a namespace holds, path by path."""
    tree = cache.tree(namespace)
    return [
        Resident(
            tree.tokens_of(leaf),
            frozenset(node.stop for node in leaf.path() if node.checkpoint is not None),
        )
        for leaf in tree.nodes()
        if not leaf.children
    ]


def _logprobs(node: Node) -> Array:
    """Those of a node's tokens, NaN where they are not known."""
    held = node.span.logprobs if isinstance(node.span, ExtentRange) else None
    return np.full(len(node), np.nan, np.float32) if held is None else held


def _bytes(extent: Extent) -> tuple[bytes, ...]:
    return tuple(np.array(buffer).tobytes() for buffer in extent.buffers)


def _is_whole(found: Sequence[Content], layout: Layout, length: int) -> bool:
    """Whether every layer holds all that its next token attends to."""
    for leaf, rows in zip(layout.leaves, found, strict=True):
        if isinstance(leaf, TokenLeaf):
            assert isinstance(rows, Rows)
            held = set(rows.positions.tolist())
            if not all(held.issuperset(range(*run)) for run in leaf.retention.needed(length)):
                return False
    return True


def _can_trim(caches: Sequence[Any], length: int) -> bool:
    """Whether all layers can be cut there, and chunked ones know enough to go on."""
    if not all(cache.is_trimmable() for cache in caches):
        return False
    chunked = [cache for cache in caches if isinstance(cache, ChunkedClone)]
    return all(cache.start_position <= max(0, length - cache.chunk_size) for cache in chunked)
