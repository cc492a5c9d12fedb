"""The cache's side of the cold tier: what it covers, writes in flight, restores and their cost."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from .cold import ColdMatch, ColdStore, ColdWrite, Restored
from .lease import Lender, PromptLease
from .node import Node
from .plan import Plan
from .prefix_hash import Tokens
from .space import Space, resident_bytes

MAX_FAILURES = 3
"""So many writes in a row may fail before the store is declared unavailable."""

RATE_WEIGHT = 0.3
"""Weight of the newest measurement in a rate."""

_log = logging.getLogger(__name__)


class CostGate:
    """Whether reading is faster than computing, by measured rates; yes until both are known."""

    def __init__(self) -> None:
        self.restore_rate = 0.0
        self.prefill_rate = 0.0

    def note_restore(self, size: int, seconds: float) -> None:
        """`size` bytes were read in `seconds`."""
        self.restore_rate = _blend(self.restore_rate, size, seconds)

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """`tokens` were computed in `seconds`."""
        self.prefill_rate = _blend(self.prefill_rate, tokens, seconds)

    def opens_for(self, size: int, gained: int) -> bool:
        """Whether to read `size` bytes in order not to compute `gained` tokens."""
        if not self.restore_rate or not self.prefill_rate:
            return True
        return size / self.restore_rate < gained / self.prefill_rate


class Restoration:
    """One reading of a stored sequence, shared by all who wait for it; `run` in any thread."""

    def __init__(
        self, tier: "ColdTier", match: ColdMatch, namespace: str, tokens: Tokens, ram_tokens: int
    ) -> None:
        self.match = match
        self.namespace = namespace
        self.tokens = tokens
        self.ram_tokens = ram_tokens
        self.restored: Restored | None = None
        self.error: Exception | None = None
        self.is_settled = False
        self._tier = tier
        self._lock = threading.Lock()
        self._has_run = False

    def run(self) -> None:
        """Read, or wait for whoever is reading. Never raises; `error` says what went wrong."""
        with self._lock:
            if self._has_run:
                return
            self._has_run = True
            self._tier.read(self)


class ColdTier:
    """A store and what is known about it: covered nodes, writes in flight, failures, rates."""

    def __init__(
        self,
        store: ColdStore,
        lender: Lender,
        clock: Callable[[], float],
        write_limit: int,
    ) -> None:
        self.gate = CostGate()
        self.is_available = True
        self.write_limit = write_limit
        self.pending_bytes = 0
        self._store = store
        self._lender = lender
        self._clock = clock
        self._failures = 0
        self._covered: set[Node] = set()
        self._marked: set[Node] = set()
        self._writes: dict[Node, _Write] = {}
        self._through: dict[PromptLease, int] = {}
        self._outcomes: deque[_Outcome] = deque()
        self._restorations: dict[tuple[str, str], Restoration] = {}

    # Reading

    def find(self, tokens: Tokens, namespace: str) -> ColdMatch | None:
        """What the store has for a prompt; a store that fails has nothing."""
        try:
            return self._store.find(tokens, namespace)
        except Exception:
            _log.exception("the cold store failed to look up a prompt")
            return None

    def restoration(
        self, match: ColdMatch, namespace: str, tokens: Tokens, ram_tokens: int
    ) -> Restoration:
        """The reading of a match: a new one, or the one under way."""
        key = (namespace, match.name)
        if key not in self._restorations:
            self._restorations[key] = Restoration(
                self, match, namespace, tokens[: match.length].copy(), ram_tokens
            )
        return self._restorations[key]

    def read(self, restoration: Restoration) -> None:
        """Do what a restoration stands for, and measure it."""
        started = self._clock()
        try:
            restoration.restored = self._store.restore(restoration.match)
        except Exception as error:
            restoration.error = error
            return
        self.gate.note_restore(restoration.match.bytes, self._clock() - started)

    def settle(self, restoration: Restoration) -> bool:
        """Whether the caller is the one to make use of a restoration that has run."""
        self._restorations.pop((restoration.namespace, restoration.match.name), None)
        mine, restoration.is_settled = not restoration.is_settled, True
        return mine

    def discard(self, restoration: Restoration, why: object) -> None:
        """What was read is unusable: say so, and have the store forget it."""
        _log.error("dropped unusable cold entry %s: %s", restoration.match.name, why)
        try:
            self._store.delete(restoration.match)
        except Exception:
            _log.exception("the cold store failed to delete %s", restoration.match.name)

    # Writing

    def is_durable(self, node: Node) -> bool:
        """Whether the store has all that would be lost with the node."""
        return node in self._covered and (node.checkpoint is None or node in self._marked)

    def is_writing(self, node: Node) -> bool:
        """Whether the node is on its way to the store."""
        return node in self._writes

    def has_room_for(self, size: int) -> bool:
        """Whether one more write of that size may be in flight."""
        return not self.pending_bytes or self.pending_bytes + size <= self.write_limit

    def write(self, space: Space, node: Node) -> bool:
        """Start writing the path that ends at a node; False if the store does not take it."""
        path = node.path()
        start = next((each.start for each in path if each not in self._covered), node.stop)
        size = resident_bytes([each for each in path if each.start >= start])
        size = size or resident_bytes([node])
        if not self.has_room_for(size):
            return False
        lease = self._lender.lend(space, node, Plan(prompt_tokens=node.stop, ram_tokens=node.stop))
        self._writes[node] = _Write(lease, start, size)
        self.pending_bytes += size
        done = _Done(self._outcomes, node)
        try:
            self._store.store(ColdWrite(space.name, lease.tokens, start, size, lease, done))
        except Exception as error:
            done(error)
            return False
        return True

    def write_through(self, namespace: str, lease: PromptLease) -> bool:
        """Offer an entry that was never in RAM; it is lost if the store does not take it."""
        size = sum(cache.nbytes for cache in lease.caches)
        if not self.has_room_for(size):
            return False
        done = _Done(self._outcomes, lease)
        self._through[lease] = size
        self.pending_bytes += size
        try:
            self._store.store(ColdWrite(namespace, lease.tokens, 0, size, lease, done))
        except Exception as error:
            done(error)
            return False
        return True

    def drain(self) -> bool:
        """Take note of writes that have ended; whether nodes may leave that could not before."""
        was_available, freed = self.is_available, False
        while self._outcomes:
            written, error = self._outcomes.popleft()
            self._ended(written, error is None)
            if error is None:
                self._failures, freed = 0, True
            else:
                self._failed(error)
        return freed or was_available != self.is_available

    def cover(self, node: Node) -> None:
        """What was restored is in the store already."""
        self._cover(node, 0)

    def divided(self, upper: Node, lower: Node) -> None:
        """A node was split: both halves are where the whole was."""
        if lower in self._covered:
            self._covered.add(upper)

    def left(self, node: Node) -> None:
        """A node has left the tree."""
        self._covered.discard(node)
        self._marked.discard(node)

    def check_integrity(self, nodes: set[Node]) -> None:
        """Assert that only nodes in RAM are remembered."""
        assert self._covered <= nodes
        assert self._marked <= self._covered
        through = sum(self._through.values())
        assert self.pending_bytes == through + sum(w.bytes for w in self._writes.values())

    def _ended(self, written: Node | PromptLease, covered: bool) -> None:
        if isinstance(written, PromptLease):
            self.pending_bytes -= self._through.pop(written)
            written.release()
            return
        write = self._writes.pop(written)
        self.pending_bytes -= write.bytes
        write.lease.release()
        if covered:
            self._cover(written, write.start)

    def _cover(self, node: Node, start: int) -> None:
        if node.span is None:
            return
        if node.checkpoint is not None:
            self._marked.add(node)
        self._covered.update(each for each in node.path() if each.start >= start)

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        _log.error("a write to the cold store failed (%d in a row): %s", self._failures, error)
        if self._failures >= MAX_FAILURES and self.is_available:
            self.is_available = False
            _log.error("the cold store is unavailable: nothing is written to it any more")


class _Write(NamedTuple):
    lease: PromptLease
    start: int
    bytes: int


_Outcome = tuple[Node | PromptLease, Exception | None]


class _Done:
    """Reports the end of a write once, from any thread, to be noted by the cache's own."""

    def __init__(self, outcomes: "deque[_Outcome]", written: Node | PromptLease) -> None:
        self._outcomes: deque[_Outcome] | None = outcomes
        self._written = written

    def __call__(self, error: Exception | None) -> None:
        outcomes, self._outcomes = self._outcomes, None
        if outcomes is not None:
            outcomes.append((self._written, error))


def _blend(rate: float, amount: int, seconds: float) -> float:
    if seconds <= 0:
        return rate
    newest = amount / seconds
    return RATE_WEIGHT * newest + (1 - RATE_WEIGHT) * rate if rate else newest
