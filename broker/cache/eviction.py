"""Which leaf leaves memory next: policies, next-use hints, the queue that orders them. No MLX."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple, Protocol

from msgspec import Struct

from .density import HitDensity
from .node import Node

__all__ = ["LRU", "EvictionPolicy", "EvictionQueue", "HitDensity", "QueueStatistics"]


class EvictionPolicy(Protocol):
    """The order of the leaves for which nobody gave a hint.

    Leaves of one group leave least recently used first; among the heads of the groups, the one of
    the lowest density leaves. So a policy needs no order of its own, and a victim costs O(log n).
    """

    def used(self, node: Node, admitted: bool) -> None:
        """A node came into memory (`admitted`) or, being there, was hit."""
        ...

    def group(self, node: Node) -> int:
        """The node's group, which only a use may change."""
        ...

    def density(self, node: Node) -> float:
        """What keeping the node is worth now, in any unit."""
        ...

    def leaving(self, node: Node) -> None:
        """A node is about to leave memory; it may yet stay."""
        ...


class LRU:
    """Least recently used first."""

    def used(self, node: Node, admitted: bool) -> None:
        """Nothing to learn: the tree keeps the time of last use."""

    def group(self, node: Node) -> int:
        """All leaves are in one."""
        return 0

    def density(self, node: Node) -> float:
        """With one group there is nothing to compare."""
        return 0.0

    def leaving(self, node: Node) -> None:
        """Nothing to remember."""


class QueueStatistics(Struct, frozen=True, kw_only=True):
    """Leaves that could leave memory now, those of them with a hint, and those a pin keeps."""

    evictable: int
    hinted: int
    pinned: int
    evictions: int


class _Place(NamedTuple):
    """A place in a heap, void once its ticket is; tickets, unlike nodes, keep nothing alive."""

    priority: int
    order: float
    ticket: int


class EvictionQueue:
    """The evictable leaves of all trees of a cache, in the order in which they should leave.

    Trees report to it; the owner of the bytes takes `victims`. Lower priority goes first. Among
    equals a leaf with a hint will wait until it is due, one without is expected to wait as long
    as it has lain idle, and the longest wait leaves first; between leaves without a hint the
    policy decides. A hint overdue by as much as it lay ahead of the last use lapses.
    """

    def __init__(
        self,
        policy: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy if policy is not None else HitDensity()
        self._clock = clock
        self._queued: dict[int, Node] = {}
        self._aside: dict[Node, None] = {}
        self._groups: defaultdict[int, list[_Place]] = defaultdict(list)
        self._hinted: list[_Place] = []
        self._timers: list[_Place] = []
        self._tickets = count(1)
        self._evictions = 0

    def used(self, node: Node, admitted: bool) -> None:
        """A tree's report of a use."""
        self.policy.used(node, admitted)

    def changed(self, node: Node) -> None:
        """Take a node's new place: in the order if it is an unleased leaf in RAM, else nowhere."""
        self._queued.pop(node.ticket, None)
        self._aside.pop(node, None)
        node.ticket = 0
        if not node.is_held_leaf:
            return
        now = self._clock()
        node.ticket = ticket = next(self._tickets)
        self._queued[ticket] = node
        due = _next_due(node, now)
        if node.pinned_until > now:
            self._push(self._timers, _Place(0, node.pinned_until, ticket))
        elif due is None:
            group = self._groups[self.policy.group(node)]
            self._push(group, _Place(node.priority, node.last_used, ticket))
        else:
            self._push(self._hinted, _Place(node.priority, -due, ticket))
            self._push(self._timers, _Place(0, _lapse(node, due), ticket))

    def victims(self) -> Generator[Node, None, None]:
        """Nodes in the order in which they should leave, parents after their last child.

        Remove or detach what is offered, or pass over it: what is still a leaf when the iteration
        ends (close it, or leave the loop) is queued again.
        """
        offered: list[Node] = []
        try:
            while (node := self._pop()) is not None:
                offered.append(node)
                self.policy.leaving(node)
                yield node
                self._evictions += node.span is None or node.parent is None
        finally:
            for node in offered:
                if not node.ticket and node not in self._aside:
                    self.changed(node)

    def set_aside(self, node: Node) -> None:
        """Offer a node, which was offered just now, no more among the victims before it changes.

        So a long queue is not gone through each time while nothing of it can leave.
        """
        if node.is_held_leaf:
            self._aside[node] = None

    def aside(self) -> Generator[Node, None, None]:
        """What was set aside, the first ones first, until one of them neither leaves nor changes
        when it is offered.
        """
        while self._aside:
            node = next(iter(self._aside))
            yield node
            if node in self._aside:
                return
            self._evictions += node.span is None or node.parent is None

    def statistics(self) -> QueueStatistics:
        """Counts; takes time in proportion to the leaves."""
        now = self._clock()
        pinned = sum(node.pinned_until > now for node in self._queued.values())
        return QueueStatistics(
            evictable=len(self._queued) + len(self._aside) - pinned,
            hinted=sum(place.ticket in self._queued for place in self._hinted),
            pinned=pinned,
            evictions=self._evictions,
        )

    def check_integrity(self) -> None:
        """Assert that what is queued are evictable leaves, each in the heap where it belongs."""
        for ticket, node in self._queued.items():
            assert node.ticket == ticket, node
            assert node.is_held_leaf, node
        for node in self._aside:
            assert not node.ticket, node
            assert node.is_held_leaf, node
        heaps = {**self._groups, -1: self._hinted}
        queued: Counter[int] = Counter()
        for group, heap in heaps.items():
            nodes = [self._queued[each.ticket] for each in heap if each.ticket in self._queued]
            assert all(group in (-1, self.policy.group(node)) for node in nodes), group
            queued.update(node.ticket for node in nodes)
        timed = {place.ticket for place in self._timers}
        assert not queued or max(queued.values()) == 1, queued
        assert all(ticket in queued or ticket in timed for ticket in self._queued)

    def _pop(self) -> Node | None:
        now = self._clock()
        while self._has_head(self._timers) and self._timers[0].order <= now:
            self.changed(self._queued[heappop(self._timers).ticket])
        heap = self._next_heap(now)
        if heap is None:
            return None
        node = self._queued.pop(heappop(heap).ticket)
        node.ticket = 0
        return node

    def _next_heap(self, now: float) -> list[_Place] | None:
        """The heap whose head leaves next."""
        heads = [heap for heap in self._groups.values() if self._has_head(heap)]
        plain = min(heads, key=self._rank) if heads else None
        if not self._has_head(self._hinted):
            return plain
        if plain is None or _outwaits(self._hinted[0], plain[0], now):
            return self._hinted
        return plain

    def _rank(self, heap: list[_Place]) -> tuple[int, float, float]:
        head = heap[0]
        return head.priority, self.policy.density(self._queued[head.ticket]), head.order

    def _has_head(self, heap: list[_Place]) -> bool:
        while heap and heap[0].ticket not in self._queued:
            heappop(heap)
        return bool(heap)

    def _push(self, heap: list[_Place], place: _Place) -> None:
        """Add a place; sweep the void ones out once they are most of the heap."""
        heappush(heap, place)
        if len(heap) > 64 + 2 * len(self._queued):
            heap[:] = [each for each in heap if each.ticket in self._queued]
            heapify(heap)


def _outwaits(hinted: _Place, plain: _Place, now: float) -> bool:
    """Whether a leaf with a hint goes before one without."""
    if hinted.priority != plain.priority:
        return hinted.priority < plain.priority
    due, last_used = -hinted.order, plain.order
    return due - now > now - last_used


def _next_due(node: Node, now: float) -> float | None:
    """The earliest hint that has not lapsed; lapsed ones are forgotten."""
    while node.hints:
        if _lapse(node, node.hints[0]) > now:
            return node.hints[0]
        node.hints.pop(0)
    return None


def _lapse(node: Node, due: float) -> float:
    return due + max(0.0, due - node.last_used)
