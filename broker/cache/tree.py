"""The prefix tree of one namespace: token-exact, radix, an index only. No MLX.

Edges are uint32 arrays that a split copies, so a node never pins tokens it does not report.
Children are found by their first token and compared token by token: no hash decides what matches.
Nothing recurses; a path may have a hundred thousand nodes.
"""

import math
import time
from bisect import insort
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np

from ..errors import CacheError
from .audit import TreeStatistics, check_nodes, count
from .naming import name_of
from .node import HELD, PARENTS, TRANSITIONS, Node, NodeState, Span
from .prefix_hash import EntryName, Tokens, TokenSource, as_tokens, namespace_digest
from .walk import Walk, follow

__all__ = ["MonotoneClock", "Observer", "PrefixTree", "Walk"]

MAX_HINTS = 1024
"""Expectations that a node remembers: the earliest ones."""


class Observer(Protocol):
    """Told of what the order of eviction depends on."""

    def changed(self, node: Node) -> None:
        """The node may have become evictable, ceased to be, or changed its place in the order."""
        ...

    def used(self, node: Node, admitted: bool) -> None:
        """The node became resident (`admitted`) or, being resident, was hit."""
        ...


class MonotoneClock:
    """A clock that never goes back, over one that may: what has expired stays expired."""

    def __init__(self, source: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._latest = float("-inf")

    def __call__(self) -> float:
        self._latest = max(self._latest, self._source())
        return self._latest


class Insertion(NamedTuple):
    """What `insert` did: the node at the end, the one it created, the upper half of a split."""

    node: Node
    created: Node | None
    split: Node | None


class PrefixTree:
    """All sequences of a namespace. One thread uses it; nothing here locks.

    `digest` is what names are chained from (default: of the namespace's name). `observer` hears of
    nodes whose evictability changes: an `EvictionQueue`, shared by all trees of a cache, as is
    `clock`.
    """

    def __init__(
        self,
        namespace: str = "",
        *,
        digest: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
        observer: Observer | None = None,
    ) -> None:
        self.namespace = namespace
        self.clock = clock if isinstance(clock, MonotoneClock) else MonotoneClock(clock)
        self._observer = observer
        self.root = Node(self, None, np.empty(0, np.uint32), self.clock())
        self.root.state = NodeState.RESIDENT
        self.root.page_digest = namespace_digest(namespace) if digest is None else digest
        self._pinned: set[Node] = set()
        self._nodes = 0

    def __len__(self) -> int:
        """Number of nodes, without the root."""
        return self._nodes

    # Reading

    def walk(self, tokens: TokenSource) -> Walk:
        """Follow `tokens` from the root as far as any stored sequence agrees. Changes nothing."""
        return follow(self.root, as_tokens(tokens))

    def find(self, tokens: TokenSource) -> Node | None:
        """The node that ends exactly where `tokens` end, or None."""
        wanted = as_tokens(tokens)
        walk = self.walk(wanted)
        if not walk.path or walk.length < len(wanted) or walk.path[-1].stop != walk.length:
            return None
        return walk.path[-1]

    def tokens_of(self, node: Node) -> Tokens:
        """The whole sequence from the root to the node's end (a new array)."""
        parts = [each.tokens for each in node.path()]
        return np.concatenate(parts) if parts else np.empty(0, np.uint32)

    def entry_below(self, node: Node) -> Node:
        """An entry whose path runs through `node`, or itself: the donor of a match there.

        Prefers the child added last. Where no entry is left below (it was evicted), the leaf
        reached.
        """
        while not node.is_entry and node.children:
            node = next(reversed(node.children.values()))
        return node

    def name(self, node: Node) -> EntryName:
        """The name of the sequence that ends at `node`; hashed once, then kept with the nodes."""
        return name_of(node)

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents before children."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def leaves_first(self) -> Iterator[Node]:
        """All nodes but the root, children before parents; safe to remove each as it comes."""
        return reversed(list(self.nodes()))

    def is_pinned(self, node: Node) -> bool:
        """Whether a pin on this very node is in force. A pin below protects it as a child does."""
        return node.pinned_until > self.clock()

    def pinned_nodes(self) -> set[Node]:
        """Every node that a pin protects: the pinned ones and all above them."""
        self._pinned = {node for node in self._pinned if self.is_pinned(node)}
        covered: set[Node] = set()
        for pinned in self._pinned:
            node = pinned
            while node.parent is not None and node not in covered:
                covered.add(node)
                node = node.parent
        return covered

    # Changing the shape

    def insert(
        self,
        tokens: TokenSource,
        span: Span | None = None,
        *,
        state: NodeState = NodeState.PENDING,
        priority: int = 0,
        walk: Walk | None = None,
    ) -> Insertion:
        """Make `tokens` an entry: split where it diverges, add one node for what is new.

        With a `span`, which must be exactly as long as what is new, the new node is resident;
        without, it gets `state`. Existing nodes keep theirs (fill cold ones with `attach`, top
        down). `walk` saves walking again where nothing changed since. Raises `CacheError`,
        changing nothing, for an empty sequence, a span of another length, or a state that cannot
        be below what it diverges from.
        """
        wanted = as_tokens(tokens)
        walk = self.walk(wanted) if walk is None else walk
        above = walk.node_at(walk.length) if walk.length else self.root
        new = len(wanted) - walk.length
        state = state if span is None else NodeState.RESIDENT
        if not len(wanted):
            raise CacheError("an entry needs at least one token")
        if len(span or ()) != (new if state is NodeState.RESIDENT else 0):
            raise CacheError(f"span of {len(span or ())} tokens for {new} new {state.value} tokens")
        if new and above.state not in PARENTS[state]:
            raise CacheError(f"{state.value} below {above.state.value} at token {walk.length}")
        upper = self.split(above, walk.length) if walk.length < above.stop else None
        node = upper or above
        created = self._append(node, wanted[walk.length :], state, span) if new else None
        node = created or node
        node.is_entry = True
        self.prioritise(node, priority)
        return Insertion(node, created, upper)

    def split(self, node: Node, at: int) -> Node:
        """Cut `node` at absolute position `at`, inside it; returns the new node that ends there.

        The payload is cut through its own `split`; nothing is copied but the tokens' index.
        """
        assert node.parent is not None, node
        assert node.start < at < node.stop, (node, at)
        parent, cut = node.parent, at - node.start
        spans = node.span.split(at) if node.span is not None else None
        upper = Node(self, parent, node.tokens[:cut].copy(), node.last_used)
        upper.state, upper.hits, upper.priority = node.state, node.hits, node.priority
        upper.uses, upper.used_at = node.uses, node.used_at
        parent.children[int(node.tokens[0])] = upper
        node.parent, node.start, node.tokens = upper, at, node.tokens[cut:].copy()
        upper.children[int(node.tokens[0])] = node
        upper.held_children = 1 if node.state in HELD else 0
        if spans is not None:
            upper.span, node.span = spans
        self._nodes += 1
        self._changed(node)
        return upper

    def remove(self, node: Node) -> None:
        """Drop a leaf from the index. Its payloads are the caller's to release.

        Raises `CacheError` if it has children or leases.
        """
        if node.children or node.leases or node.parent is None:
            raise CacheError(f"{node} has {len(node.children)} children and {node.leases} leases")
        parent = node.parent
        if node.state in HELD:
            self._let_go(node)
        del parent.children[int(node.tokens[0])]
        self._pinned.discard(node)
        node.parent = None
        self._nodes -= 1

    # Changing what a node holds

    def attach(self, node: Node, span: Span) -> None:
        """Make a node resident. Raises `CacheError` for a wrong length or a parent that is not."""
        if len(span) != len(node):
            raise CacheError(f"span of {len(span)} tokens for {node} of {len(node)}")
        self.set_state(node, NodeState.RESIDENT, span)

    def detach(self, node: Node) -> Span | None:
        """Take the payload out of a leaf; the node becomes cold. Returns the payload.

        Raises `CacheError` if something in RAM hangs below it or somebody leases it.
        """
        if node.held_children or node.leases:
            raise CacheError(
                f"{node} has {node.held_children} children in RAM and {node.leases} leases"
            )
        span = node.span
        self.set_state(node, NodeState.COLD)
        return span

    def set_state(self, node: Node, state: NodeState, span: Span | None = None) -> None:
        """Move a node along its life; raises `CacheError` for an illegal step, quoting both states.

        Resident nodes have a span, others none. RAM is closed towards the root: resident only below
        resident, live below live or resident, pending below anything but cold.
        """
        parent = node.parent
        if parent is None or state not in TRANSITIONS[node.state]:
            expected = sorted(each.value for each in TRANSITIONS[node.state])
            raise CacheError(f"{node} can become {', '.join(expected)}; got {state.value}")
        if parent.state not in PARENTS[state]:
            raise CacheError(f"{node} cannot be {state.value} below {parent.state.value}")
        if (state is NodeState.RESIDENT) != (span is not None):
            raise CacheError(
                f"{node} as {state.value} {'needs a' if span is None else 'takes no'} span"
            )
        was_held = node.state in HELD
        if state is NodeState.COLD and node.held_children:
            raise CacheError(f"{node} has {node.held_children} children in RAM; cannot be cold")
        node.span = span
        if was_held and state not in HELD:
            self._let_go(node)
        elif not was_held and state in HELD:
            parent.held_children += 1
            self._changed(parent)
        node.state = state
        if state is NodeState.RESIDENT:
            self._used(node, admitted=True)
        self._changed(node)

    # Protecting and ordering

    def lease(self, node: Node) -> None:
        """Keep a node, and so all above it, until `release`. Leases are counted."""
        node.leases += 1
        self._changed(node)

    def release(self, node: Node) -> None:
        """Give back one lease."""
        assert node.leases > 0, node
        node.leases -= 1
        self._changed(node)

    def pin(self, node: Node, ttl: float) -> None:
        """Keep a node for `ttl` seconds from now; a pin that lasts longer already stays.

        Raises `CacheError` unless `ttl` is positive.
        """
        if not ttl > 0:
            raise CacheError(f"pinned for {ttl} seconds; more than 0 are needed")
        node.pinned_until = max(node.pinned_until, self.clock() + ttl)
        self._pinned.add(node)
        self._changed(node)

    def unpin(self, node: Node) -> None:
        """Let a pin end now."""
        node.pinned_until = float("-inf")
        self._pinned.discard(node)
        self._changed(node)

    def prioritise(self, node: Node, priority: int) -> None:
        """Raise a node and all above it to at least `priority`; the lowest leaves first."""
        walker: Node | None = node
        while walker is not None and walker.priority < priority:
            walker.priority = priority
            self._changed(walker)
            walker = walker.parent

    def touch(self, node: Node) -> None:
        """Count a hit on a node and all above it, and make all of it the most recently used."""
        now = self.clock()
        walker: Node | None = node
        while walker is not None:
            walker.last_used = now
            walker.hits += 1
            if walker.hints:
                walker.hints.pop(0)
            if walker.state is NodeState.RESIDENT and walker.parent is not None:
                self._used(walker, admitted=False)
            if not walker.held_children:
                self._changed(walker)
            walker = walker.parent

    def expect(self, node: Node, eta: float, *, instead: bool = False) -> None:
        """Hint that the sequence ending at `node` is needed in `eta` seconds (inf: never again).

        Several users may expect the same node; each hit takes the earliest expectation away. With
        `instead` nothing else is expected any more.
        Raises `CacheError` for an `eta` that is no number.
        """
        if math.isnan(eta):
            raise CacheError(f"expected in {eta} seconds; a number or inf is needed")
        if instead:
            node.hints = None
        _expect(node, self.clock() + eta)
        self._changed(node)

    # Telling about itself

    def statistics(self) -> TreeStatistics:
        """Counts over all nodes; takes time in proportion to them."""
        return count(list(self.nodes()), len(self.pinned_nodes()))

    def check_integrity(self) -> None:
        """Assert every invariant of every node; for tests and idle moments."""
        nodes = list(self.nodes())
        check_nodes(self.root, nodes)
        assert len(nodes) == self._nodes, f"{len(nodes)} nodes, {self._nodes} recorded"
        assert all(node.tree is self and node.parent is not None for node in self._pinned)

    # Helpers

    def _append(self, parent: Node, tokens: Tokens, state: NodeState, span: Span | None) -> Node:
        node = Node(self, parent, tokens.copy(), self.clock())
        node.state, node.span = state, span
        parent.children[int(tokens[0])] = node
        parent.held_children += state in HELD
        self._nodes += 1
        above: Node | None = parent
        while above is not None and above.last_used < node.last_used:
            above.last_used = node.last_used
            above = above.parent
        self._changed(parent)
        if state is NodeState.RESIDENT:
            self._used(node, admitted=True)
        self._changed(node)
        return node

    def _let_go(self, node: Node) -> None:
        """The node's KV leaves RAM; its parent may be next, and takes over its hints."""
        parent = node.parent
        assert parent is not None
        # That a sequence is needed no more says nothing about what others had a use for, too.
        is_shared = parent.hits > node.hits + 1
        for due in node.hints or ():
            if due < math.inf or not is_shared:
                _expect(parent, due)
        node.hints = None
        parent.held_children -= 1
        node.state = NodeState.COLD
        self._changed(node)
        self._changed(parent)

    def _used(self, node: Node, admitted: bool) -> None:
        if self._observer is not None:
            self._observer.used(node, admitted)

    def _changed(self, node: Node) -> None:
        if self._observer is not None:
            self._observer.changed(node)


def _expect(node: Node, due: float) -> None:
    if node.hints is None:
        node.hints = []
    insort(node.hints, due)
    del node.hints[MAX_HINTS:]
