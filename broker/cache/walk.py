"""Following a prompt through a prefix tree: how far it agrees, and where it parts. No MLX."""

from typing import Any, NamedTuple

from ..trace.events import Divergence
from .node import Node, NodeState
from .prefix_hash import Tokens, common_prefix_length


class Walk(NamedTuple):
    """How far a prompt follows the tree.

    `path` holds the nodes from the first below the root to the deepest that matches; the last may
    match only up to `length`, which is the longest common prefix with any stored sequence,
    whatever its state. `divergence` is None where the prompt or the stored path simply ends.
    """

    path: list[Node]
    length: int
    divergence: Divergence | None

    @property
    def held_length(self) -> int:
        """How much of `length` is resident, counted from the start without a gap."""
        for node in self.path:
            if node.state is not NodeState.RESIDENT:
                return node.start
        return self.length

    def node_at(self, length: int) -> Node:
        """The node that holds token `length` - 1, in 1..self.length, whatever was split since."""
        node = next(node for node in self.path if node.stop >= length)
        while node.parent is not None and node.start >= length:
            node = node.parent
        return node


def follow(root: Node, wanted: Tokens) -> Walk:
    """Follow a prompt from the root as far as any stored sequence agrees. Changes nothing."""
    data = wanted.tobytes()
    path: list[Node] = []
    node, at, total = root, 0, len(wanted)
    while at < total:
        child = node.children.get(int(wanted[at]))
        if child is None:
            return Walk(path, at, _divergence_among(node, wanted, at))
        path.append(child)
        # One comparison in C for a whole edge; where it fails, look for the place.
        edge: Any = child.tokens
        if not data.startswith(edge, 4 * at):
            at += common_prefix_length(child.tokens, wanted[at:])
            return Walk(path, at, _divergence_inside(child, wanted, at))
        node, at = child, child.stop
    return Walk(path, at, None)


def _divergence_among(node: Node, wanted: Tokens, at: int) -> Divergence | None:
    """The token that the child added last has where `wanted` has another."""
    if not node.children:
        return None
    return Divergence(at, next(reversed(node.children)), int(wanted[at]))


def _divergence_inside(node: Node, wanted: Tokens, at: int) -> Divergence | None:
    if at == len(wanted):
        return None
    return Divergence(at, int(node.tokens[at - node.start]), int(wanted[at]))
