"""One namespace of the prompt cache: its tree, its layout, its counts."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..trace.events import MissReason
from .eviction import EvictionQueue
from .extents import ExtentRange
from .layout import Layout
from .logprobs import lacks_logprobs, usable_length
from .node import Node
from .prefix_hash import Tokens
from .statistics import NamespaceStatistics
from .tree import PrefixTree, Walk


class Match(NamedTuple):
    """How much of a prompt a namespace can serve: `length` tokens of the walked path.

    `reason` is what makes the usable length end before the matched one, None if nothing does.
    """

    walk: Walk
    length: int
    reason: MissReason | None


class Space:
    """One namespace. `layout` is that of the first put; until `restart` all later ones must have
    it.
    """

    def __init__(self, name: str, queue: EvictionQueue, clock: Callable[[], float]) -> None:
        self.name = name
        self.layout: Layout | None = None
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self._observer = _Observer(queue)
        self._queue = queue
        self._clock = clock
        self.tree = PrefixTree(name, clock=clock, observer=self._observer)

    def match(self, tokens: Tokens, limit: int, alternatives: int | None = None) -> Match:
        """The deepest usable length up to `limit`. Changes nothing.

        With `alternatives` the log-probabilities of the tokens are needed too, and that many of
        the likeliest tokens in each one's place.
        """
        walk = self.tree.walk(tokens)
        length = max(min(usable_length(walk, alternatives), limit), 0)
        reason: MissReason | None = "no_logprobs" if lacks_logprobs(walk, alternatives) else None
        layout = self.layout
        if layout is None or not (layout.has_state or layout.has_windows) or not length:
            return Match(walk, length, reason)
        spans = [node.span for node in walk.path if isinstance(node.span, ExtentRange)]
        marks = [node.stop for node in walk.path if node.checkpoint is not None]
        valid = layout.valid_length(spans, marks, length)
        return Match(walk, valid.length, valid.reason or reason)

    def usable_at(self, node: Node) -> bool:
        """Whether a clone can end exactly where `node` ends."""
        layout = self.layout
        assert layout is not None
        if not (layout.has_state or layout.has_windows):
            return True
        path = node.path()
        spans = [each.span for each in path if isinstance(each.span, ExtentRange)]
        marks = [node.stop] if node.checkpoint is not None else []
        return layout.valid_length(spans, marks, node.stop).length == node.stop

    def restart(self) -> list[Node]:
        """Forget every sequence; returns the old nodes, whose payloads are the caller's."""
        nodes = list(self.tree.leaves_first())
        for node in nodes:
            if not node.leases and not node.children:
                self.tree.remove(node)
        # What is leased stays with the old tree, which nobody walks any more.
        self._observer.is_closed = True
        self.layout = None
        self._observer = _Observer(self._queue)
        self.tree = PrefixTree(self.name, clock=self._clock, observer=self._observer)
        return nodes

    def statistics(self) -> NamespaceStatistics:
        """Counts, and the sizes of the index; the bytes of KV are added by who holds them."""
        index = self.tree.statistics()
        return NamespaceStatistics(
            nodes=index.nodes,
            tokens=index.tokens,
            index_bytes=index.index_bytes,
            checkpoints=index.checkpoints,
            reasons=dict(sorted(self.reasons.items())),
            **self.counts,
        )


class _Observer:
    """Passes a tree's changes on until the tree is forgotten."""

    def __init__(self, queue: EvictionQueue) -> None:
        self._queue = queue
        self.is_closed = False

    def changed(self, node: Node) -> None:
        if not self.is_closed:
            self._queue.changed(node)

    def used(self, node: Node, admitted: bool) -> None:
        if not self.is_closed:
            self._queue.used(node, admitted)


def resident_bytes(nodes: Iterable[Node]) -> int:
    """Exact bytes of what nodes hold, checkpoints included."""
    total = 0
    for node in nodes:
        if isinstance(node.span, ExtentRange):
            total += node.span.nbytes
        if node.checkpoint is not None:
            total += node.checkpoint.nbytes
    return total
