"""A tree looked at as a whole: its counts, and every invariant that its nodes keep. No MLX."""

from collections.abc import Collection, Iterable

import numpy as np
from msgspec import Struct

from .node import HELD, PARENTS, Node, NodeState


class TreeStatistics(Struct, frozen=True, kw_only=True):
    """Counts of one tree. `index_bytes` covers tokens and objects, not the KV."""

    nodes: int
    entries: int
    tokens: int
    resident_tokens: int
    cold_tokens: int
    pending_nodes: int
    leased_nodes: int
    pinned_nodes: int
    checkpoints: int
    index_bytes: int


def count(nodes: Collection[Node], pinned: int) -> TreeStatistics:
    """The counts over all nodes of a tree, `pinned` of which a pin protects."""
    return TreeStatistics(
        nodes=len(nodes),
        entries=sum(node.is_entry for node in nodes),
        tokens=sum(map(len, nodes)),
        resident_tokens=sum(len(node) for node in nodes if node.state is NodeState.RESIDENT),
        cold_tokens=sum(len(node) for node in nodes if node.state is NodeState.COLD),
        pending_nodes=sum(node.state is NodeState.PENDING for node in nodes),
        leased_nodes=sum(bool(node.leases) for node in nodes),
        pinned_nodes=pinned,
        checkpoints=sum(node.checkpoint is not None for node in nodes),
        index_bytes=sum(node.index_bytes for node in nodes),
    )


def check_nodes(root: Node, nodes: Iterable[Node]) -> None:
    """Assert every invariant of the root and of the nodes below it."""
    assert root.state is NodeState.RESIDENT
    assert root.parent is None
    assert not len(root)
    _check_children(root)
    for node in nodes:
        _check_payload(node)
        _check_children(node)


def _check_payload(node: Node) -> None:
    assert node.stop - node.start == len(node.tokens), node
    assert node.tokens.base is None, f"{node} keeps more tokens alive than its own"
    assert node.tokens.dtype == np.uint32, node
    assert node.leases >= 0, node
    assert (node.span is not None) == (node.state is NodeState.RESIDENT), node
    assert node.span is None or len(node.span) == len(node), node
    assert not node.hints or node.hints == sorted(node.hints), node


def _check_children(node: Node) -> None:
    held = [child for child in node.children.values() if child.state in HELD]
    assert node.held_children == len(held), (node, node.held_children, held)
    for first, child in node.children.items():
        assert child.parent is node, (node, child)
        assert child.tree is node.tree, (node, child)
        assert child.start == node.stop, (node, child)
        assert len(child) > 0, (node, child)
        assert first == int(child.tokens[0]), (node, child)
        assert node.state in PARENTS[child.state], f"{child} below {node}"
        assert child.last_used <= node.last_used or node.parent is None, (
            f"{child} newer than {node}"
        )
