"""Which leaf leaves memory next: policies, next-use hints, the queue that orders them. No MLX."""

import time
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Protocol

from msgspec import Struct

from .node import Node

_Entry = tuple[int, float, int, Node]


class EvictionPolicy(Protocol):
    """The order of the leaves for which nobody gave a hint."""

    def score(self, node: Node) -> float:
        """The node's place, in seconds on the cache's clock: the lowest leaves first.

        Asked whenever the node becomes a leaf or is used as one, and kept until then. LRU's answer
        is the time of last use; a node worth more answers as if it had been used later.
        """
        ...

    def evicted(self, node: Node) -> None:
        """A node that the queue offered has left memory."""
        ...


class LRU:
    """Least recently used first."""

    def score(self, node: Node) -> float:
        """The time of last use."""
        return node.last_used

    def evicted(self, node: Node) -> None:
        """Nothing to learn."""


def default_policy() -> EvictionPolicy:
    """The policy of a cache that was not given one."""
    return LRU()


class QueueStatistics(Struct, frozen=True, kw_only=True):
    """Leaves that could leave memory now, those of them with a hint, and those a pin keeps."""

    evictable: int
    hinted: int
    pinned: int
    evictions: int


class EvictionQueue:
    """The evictable leaves of all trees of a cache, in the order in which they should leave.

    Trees report to it (`changed`); the owner of the bytes takes `victims`. Lower priority goes
    first. Among equals, a node with a hint waits until it is due, one without is expected to wait
    as long as it has lain idle by the policy's score, and the longest wait leaves first. A hint
    overdue by as much as it lay ahead of the last use lapses. Each change and each victim costs
    O(log n).
    """

    def __init__(
        self,
        policy: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy if policy is not None else default_policy()
        self._clock = clock
        self._plain: list[_Entry] = []
        self._hinted: list[_Entry] = []
        self._timers: list[tuple[float, int, Node]] = []
        self._tickets = count(1)
        self._evictions = 0

    def changed(self, node: Node) -> None:
        """Take a node's new place: in the order if it is an unleased leaf in RAM, else nowhere."""
        node.ticket = 0
        if not node.is_held_leaf:
            return
        now = self._clock()
        node.ticket = ticket = next(self._tickets)
        if node.pinned_until > now:
            heappush(self._timers, (node.pinned_until, ticket, node))
            return
        due = _next_due(node, now)
        if due is None:
            node.score = self.policy.score(node)
            _push(self._plain, (node.priority, node.score, ticket, node))
            return
        _push(self._hinted, (node.priority, -due, ticket, node))
        heappush(self._timers, (_lapse(node, due), ticket, node))

    def victims(self) -> Iterator[Node]:
        """Nodes in the order in which they should leave, parents after their last child.

        Remove or detach what is offered, or pass over it: what is still a leaf when the iteration
        ends (close it, or leave the loop) is queued again.
        """
        offered: list[Node] = []
        try:
            while (node := self._pop()) is not None:
                offered.append(node)
                yield node
                if node.span is None or node.parent is None:
                    self._evictions += 1
                    self.policy.evicted(node)
        finally:
            for node in offered:
                if not node.ticket:
                    self.changed(node)

    def statistics(self) -> QueueStatistics:
        """Counts; takes time in proportion to the leaves."""
        plain, hinted = _valid(self._plain), _valid(self._hinted)
        timed = sum(node.ticket == ticket for _, ticket, node in self._timers)
        return QueueStatistics(
            evictable=plain + hinted,
            hinted=hinted,
            pinned=timed - hinted,
            evictions=self._evictions,
        )

    def check_integrity(self) -> None:
        """Assert that whatever is queued is an evictable leaf."""
        for _, _, ticket, node in (*self._plain, *self._hinted):
            assert node.ticket != ticket or node.is_held_leaf, node

    def _pop(self) -> Node | None:
        now = self._clock()
        while self._timers and self._timers[0][0] <= now:
            _, ticket, node = heappop(self._timers)
            if node.ticket == ticket:
                self.changed(node)
        plain, hinted = _top(self._plain), _top(self._hinted)
        if plain is None and hinted is None:
            return None
        if hinted is None or (plain is not None and _leaves_before(plain, hinted, now)):
            node = heappop(self._plain)[3]
        else:
            node = heappop(self._hinted)[3]
        node.ticket = 0
        return node


def _leaves_before(plain: _Entry, hinted: _Entry, now: float) -> bool:
    if plain[0] != hinted[0]:
        return plain[0] < hinted[0]
    return now - plain[1] >= -hinted[1] - now


def _next_due(node: Node, now: float) -> float | None:
    """The earliest hint that has not lapsed; lapsed ones are forgotten."""
    while node.hints:
        if _lapse(node, node.hints[0]) > now:
            return node.hints[0]
        node.hints.pop(0)
    return None


def _lapse(node: Node, due: float) -> float:
    return due + max(0.0, due - node.last_used)


def _top(heap: list[_Entry]) -> _Entry | None:
    while heap and heap[0][3].ticket != heap[0][2]:
        heappop(heap)
    return heap[0] if heap else None


def _push(heap: list[_Entry], entry: _Entry) -> None:
    """Add an entry; sweep stale ones out when they may outnumber the rest."""
    heappush(heap, entry)
    if len(heap) > 64 and len(heap) & (len(heap) - 1) == 0 and 2 * _valid(heap) < len(heap):
        heap[:] = [each for each in heap if each[3].ticket == each[2]]
        heapify(heap)


def _valid(heap: list[_Entry]) -> int:
    return sum(entry[3].ticket == entry[2] for entry in heap)
