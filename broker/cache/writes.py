"""Writing to the cold tier: which nodes it covers, what is in flight, and when to give up on it."""

import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ..errors import ColdStoreBusy, ColdStoreRefused
from ..trace.events import Spilled
from .cold import ColdStore, ColdWrite
from .extents import ExtentRange
from .lease import Lender, PromptLease
from .naming import name_of
from .node import Node
from .plan import Plan
from .reporter import Reporter
from .space import Space, resident_bytes

MAX_FAILURES = 3
"""So many writes in a row may fail before the store is declared unavailable."""

RETRY_SECONDS = 30.0
"""How long after a failure an unavailable store is tried again, and any store by `begin_wanted`."""

_log = logging.getLogger(__name__)


class ColdWrites:
    """A cold store as the cache writes to it; at most `limit` bytes are in flight.

    A node is durable once the store has its tokens and its checkpoint. Outcomes may arrive in any
    thread, where `on_ended` is called then; `drain` takes note of them in the cache's.
    """

    def __init__(
        self,
        store: ColdStore,
        lender: Lender,
        limit: int,
        reporter: Reporter,
        clock: Callable[[], float],
        on_ended: Callable[[], None],
    ) -> None:
        self.limit = limit
        self.pending_bytes = 0
        self._store = store
        self._lender = lender
        self._reporter = reporter
        self._clock = clock
        self._on_ended = on_ended
        self._failures = 0
        self._retry_at = 0.0
        self._is_full = False
        """Whether the store was busy, and no write has ended since."""
        self._covered: dict[Node, int] = {}
        """Nodes that the store was given, and its losses when that was last known to be so."""
        self._refused: set[Node] = set()
        self._marked: set[Node] = set()
        self._writes: dict[PromptLease, _Write] = {}
        self._writing: set[Node] = set()
        self._wanted: dict[Node, Space] = {}
        self._outcomes: deque[_Outcome] = deque()

    @property
    def is_available(self) -> bool:
        """Whether anything is written: not for a while after several failures in a row."""
        return self._failures < MAX_FAILURES or self._clock() >= self._retry_at

    def was_stored(self, node: Node) -> bool:
        """Whether the store once had all that would be lost with the node."""
        return node in self._covered and (node.checkpoint is None or node in self._marked)

    def is_durable(self, node: Node) -> bool:
        """Whether the store has all that would be lost with the node, by now."""
        if not self.was_stored(node):
            return False
        losses = self._store.losses
        if self._covered[node] != losses:
            if not self._still_has(node):
                self.outdated(node)
                return False
            self._covered[node] = losses
        return True

    def is_refused(self, node: Node) -> bool:
        """Whether the store will never take the node."""
        return node in self._refused

    def is_writing(self, node: Node) -> bool:
        """Whether the node is on its way to the store."""
        return node in self._writing

    @property
    def leases(self) -> int:
        """How many nodes are kept because they are being written."""
        return len(self._writing)

    def want(self, space: Space, node: Node) -> None:
        """Have `begin_wanted` write a node, in its turn."""
        self._wanted[node] = space

    def begin_wanted(self) -> bool:
        """Begin the first wanted write; False if there is none, or none is taken now."""
        while self._wanted:
            node, space = next(iter(self._wanted.items()))
            if self._lacks(node):
                is_early = self._clock() < self._retry_at
                if is_early or not self.is_available or not self.begin(space, node):
                    return False
                space.counts["spills"] += 1
                del self._wanted[node]
                return True
            del self._wanted[node]
        return False

    def begin(self, space: Space, node: Node) -> bool:
        """Start writing the path that ends at a node; False if the store does not take it."""
        if self._is_full:
            return False
        path = node.path()
        start = next((each.start for each in path if each not in self._covered), node.stop)
        size = resident_bytes([each for each in path if each.start >= start])
        size = size or resident_bytes([node])
        if not self._has_room_for(size):
            return False
        lease = self._lender.lend(space, node, Plan(prompt_tokens=node.stop, ram_tokens=node.stop))
        self._writing.add(node)
        return self._submit(lease, self._write(space, node, start, size))

    def begin_unshelved(self, lease: PromptLease) -> bool:
        """Offer an entry that was never in RAM; it is lost if the store does not take it."""
        size = sum(cache.nbytes for cache in lease.caches)
        if not self._has_room_for(size):
            return False
        return self._submit(lease, self._write(None, None, 0, size))

    def drain(self) -> bool:
        """Take note of writes that ended; whether nodes may leave RAM that could not before."""
        was_available, freed = self.is_available, False
        while self._outcomes:
            lease, error = self._outcomes.popleft()
            write = self._writes.pop(lease)
            self.pending_bytes -= write.bytes
            lease.release()
            if write.node is not None:
                self._writing.discard(write.node)
            if not isinstance(error, ColdStoreBusy):
                self._is_full = False
            if error is None:
                self._succeeded(lease, write)
                freed = True
            elif isinstance(error, ColdStoreRefused):
                if write.node is not None and write.node.span is not None:
                    self._refused.add(write.node)
                freed = True
            else:
                if not isinstance(error, ColdStoreBusy):
                    self._failed(error)
                self._want_again(write)
        self._is_full = self._is_full and bool(self._writes)
        return freed or was_available != self.is_available

    def cover(self, node: Node, start: int = 0, losses: int | None = None) -> None:
        """The store has tokens [start, end of node) and the node's checkpoint, or had them when
        its losses were so many.
        """
        if node.span is None:
            return
        if node.checkpoint is not None:
            self._marked.add(node)
        losses = self._store.losses if losses is None else losses
        self._covered.update((each, losses) for each in node.path() if each.start >= start)

    def divided(self, upper: Node, lower: Node) -> None:
        """A node was split: both halves are where the whole was."""
        if lower in self._covered:
            self._covered[upper] = self._covered[lower]

    def outdated(self, node: Node) -> None:
        """A node holds more than was written, or the store has let go of it."""
        self._covered.pop(node, None)
        self._marked.discard(node)
        self._refused.discard(node)

    def left(self, node: Node) -> None:
        """A node has left the tree."""
        self.outdated(node)
        self._wanted.pop(node, None)

    def check_integrity(self, nodes: set[Node]) -> None:
        """Assert that only nodes in RAM are remembered, and that what is in flight adds up."""
        assert self._covered.keys() <= nodes
        assert self._marked <= self._covered.keys()
        assert self._refused <= nodes
        assert self._wanted.keys() <= nodes
        assert self.pending_bytes == sum(write.bytes for write in self._writes.values())

    def _lacks(self, node: Node) -> bool:
        """Whether a node is in RAM, not stored, and neither on its way nor refused."""
        if node.span is None or node in self._writing or node in self._refused:
            return False
        return not self.is_durable(node)

    def _has_room_for(self, size: int) -> bool:
        if self._is_full:
            return False
        return not self.pending_bytes or self.pending_bytes + size <= self.limit

    def _write(self, space: Space | None, node: Node | None, start: int, size: int) -> "_Write":
        return _Write(space, node, start, size, self._clock(), self._store.losses)

    def _submit(self, lease: PromptLease, write: "_Write") -> bool:
        self._writes[lease] = write
        self.pending_bytes += write.bytes
        done = _Done(self._outcomes, lease, self._on_ended)
        offer = ColdWrite(lease.namespace, lease.tokens, write.start, write.bytes, lease, done)
        try:
            self._store.store(offer)
        except Exception as error:
            # Nobody is to try again because of this: it would come to the same.
            # Each release of what was not taken makes room: that must not offer it at once again.
            self._is_full = self._is_full or isinstance(error, ColdStoreBusy)
            self._outcomes.append((lease, error))
            return False
        return True

    def _want_again(self, write: "_Write") -> None:
        space, node = write.space, write.node
        if space is not None and node is not None and node.span is not None:
            self.want(space, node)

    def _succeeded(self, lease: PromptLease, write: "_Write") -> None:
        if self._failures >= MAX_FAILURES:
            _log.warning("the cold store is available again")
        self._failures, self._retry_at = 0, 0.0
        node = write.node
        if node is None or node.span is None:
            return
        # By the time this is noted, what was written may have made room for what came later.
        self.cover(node, write.start, write.losses)
        self._reporter.emit(
            lambda now: Spilled(
                time=now,
                entry=str(name_of(node)),
                namespace=lease.namespace,
                tokens=node.stop - write.start,
                bytes=write.bytes,
                seconds=self._clock() - write.begun,
            )
        )

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        self._retry_at = self._clock() + RETRY_SECONDS
        if self._failures == 1:
            _log.error("a write to the cold store failed: %s", error)
        elif self._failures == MAX_FAILURES:
            _log.error("the cold store is unavailable: tried again after %g s", RETRY_SECONDS)

    def _still_has(self, node: Node) -> bool:
        try:
            tokens = node.tree.tokens_of(node)
            return self._store.covers(tokens, node.tree.namespace, _is_usable(node))
        except Exception:
            _log.exception("the cold store failed to say what it has")
            return False


def _is_usable(node: Node) -> bool:
    """Whether a sequence could be restored where the node ends, if nothing of it is lacking."""
    has_state = isinstance(node.span, ExtentRange) and node.span.extent.layout.has_state
    return node.checkpoint is not None or not has_state


class _Write(NamedTuple):
    space: Space | None
    node: Node | None
    start: int
    bytes: int
    begun: float
    losses: int
    """Of the store, before it was offered this."""


_Outcome = tuple[PromptLease, Exception | None]


class _Done:
    """Reports the end of a write once, from any thread, to be noted by the cache's own."""

    def __init__(
        self, outcomes: deque[_Outcome], lease: PromptLease, on_ended: Callable[[], None]
    ) -> None:
        self._outcomes: deque[_Outcome] | None = outcomes
        self._lease = lease
        self._on_ended = on_ended

    def __call__(self, error: Exception | None) -> None:
        outcomes, self._outcomes = self._outcomes, None
        if outcomes is not None:
            outcomes.append((self._lease, error))
            self._on_ended()
