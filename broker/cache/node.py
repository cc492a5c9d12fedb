"""A node of the prefix tree: a run of tokens, what is held for it, and its state. No MLX."""

from __future__ import annotations

import sys
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from .prefix_hash import Tokens

if TYPE_CHECKING:
    from .tree import PrefixTree


class Span(Protocol):
    """The KV of a node's tokens: a range of an extent. The tree only measures and cuts it."""

    def __len__(self) -> int: ...

    def split(self, at: int) -> tuple[Span, Span]:
        """The ranges before and after the absolute token position `at`; nothing is copied."""
        ...


class NodeState(Enum):
    """Where a node's KV is: nowhere yet, in a running row's tail, in RAM, or on disk only."""

    PENDING = "pending"
    LIVE = "live"
    RESIDENT = "resident"
    COLD = "cold"


HELD = frozenset({NodeState.PENDING, NodeState.LIVE, NodeState.RESIDENT})
"""The states of nodes that something in RAM stands behind."""

TRANSITIONS = {
    NodeState.PENDING: frozenset({NodeState.LIVE, NodeState.RESIDENT, NodeState.COLD}),
    NodeState.LIVE: frozenset({NodeState.RESIDENT, NodeState.COLD}),
    NodeState.RESIDENT: frozenset({NodeState.COLD}),
    NodeState.COLD: HELD,
}
"""What a node of each state may become."""

PARENTS = {
    NodeState.PENDING: HELD,
    NodeState.LIVE: frozenset({NodeState.LIVE, NodeState.RESIDENT}),
    NodeState.RESIDENT: frozenset({NodeState.RESIDENT}),
    NodeState.COLD: frozenset(NodeState),
}
"""Below which states a node of each state may hang: RAM is closed towards the root."""


class Node:
    """The tokens [start, stop) of every sequence that runs through it. It stands for its *end*.

    What belongs to the length `stop` stays with the node when it is split: checkpoint, leases,
    pins, hints, the entry mark and the name. A split puts a new node above it and shortens this
    one. Read the fields freely; change them only through `PrefixTree`, except `checkpoint`, which
    is the owner's to set.
    """

    __slots__ = (
        "checkpoint",
        "children",
        "held_children",
        "hints",
        "hits",
        "is_entry",
        "last_used",
        "leases",
        "page_digest",
        "parent",
        "pinned_until",
        "priority",
        "span",
        "start",
        "state",
        "stop",
        "ticket",
        "tokens",
        "tree",
        "used_at",
        "uses",
    )

    def __init__(self, tree: PrefixTree, parent: Node | None, tokens: Tokens, now: float) -> None:
        self.tree = tree
        self.parent = parent
        self.tokens = tokens
        self.start: int = parent.stop if parent else 0
        self.stop: int = self.start + len(tokens)
        self.children: dict[int, Node] = {}
        self.state = NodeState.PENDING
        self.span: Span | None = None
        self.checkpoint: Any = None
        self.is_entry = False
        self.leases = 0
        self.pinned_until = float("-inf")
        self.hints: list[float] | None = None
        self.priority = 0
        self.last_used = now
        self.hits = 0
        self.held_children = 0
        self.page_digest: bytes | None = None
        self.ticket = 0
        self.uses = 0
        self.used_at = 0

    def __len__(self) -> int:
        return self.stop - self.start

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<Node [{self.start}, {self.stop}) {self.state.value}>"

    @property
    def is_held_leaf(self) -> bool:
        """Whether it may leave RAM: resident, nothing in RAM below it, and nobody leases it."""
        return (
            self.state is NodeState.RESIDENT
            and not self.held_children
            and not self.leases
            and self.parent is not None
        )

    def path(self) -> list[Node]:
        """The nodes from the first below the root to this one."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    @property
    def index_bytes(self) -> int:
        """Bytes of the index for this node: its tokens (4 each) and the objects around them."""
        return int(self.tokens.nbytes) + NODE_BYTES + sys.getsizeof(self.children)


# A node, its array object, and the boxed start, stop, time and tick.
NODE_BYTES = 8 * len(Node.__slots__) + 16 + 112 + 2 * 28 + 2 * 24
