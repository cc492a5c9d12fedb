"""What a model's caches look like: which layers keep what, and how an extent packs it.
Comparable, hashable.

A layout is a tree like the list of caches itself (a `CacheList` nests); its leaves, depth first,
are either token leaves (KV, cut along tokens) or state leaves (valid at one length only, kept in
checkpoints). No MLX.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

from msgspec import Struct

from ..errors import CacheError
from ..trace.events import MissReason
from .dtypes import item_bytes
from .runs import Runs, clean_runs, window_length


class Retention(Struct, frozen=True, order=True):
    """Which tokens a layer needs: all of them (`window` 0), or the first `keep` and the last of a
    window.

    `window` counts the kept ones, as mlx-lm's `RotatingKVCache(max_size, keep)` does.
    """

    window: int = 0
    keep: int = 0

    @property
    def span(self) -> int:
        """How many tokens right before a length must be present; 0 means all."""
        return self.window - self.keep

    def needed(self, length: int) -> "Runs":
        """The positions that must be present for `length` to be usable."""
        if not self.window:
            return ((0, length),) if length else ()
        kept = min(self.keep, length)
        return clean_runs([(0, kept), (max(kept, length - self.span), length)])


class Plane(Struct, frozen=True):
    """One array of a token leaf, `[1, heads, tokens, dim]`."""

    dtype: str
    heads: int
    dim: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return self.heads * self.dim * item_bytes(self.dtype)


class TokenLeaf(Struct, frozen=True, tag=True):
    """A cache that is cut along tokens: `kind` is mlx-lm's class name, planes are in its order
    (keys first).
    """

    kind: str
    planes: tuple[Plane, ...]
    retention: Retention = Retention()
    group_size: int = 0
    bits: int = 0


class Slot(Struct, frozen=True):
    """One array of a state leaf, batch axis (1) first."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        count = item_bytes(self.dtype)
        for size in self.shape:
            count *= size
        return count


class StateLeaf(Struct, frozen=True, tag=True):
    """A cache that cannot be cut along tokens; an unused slot is None."""

    kind: str
    slots: tuple[Slot | None, ...]


class ListNode(Struct, frozen=True, tag=True):
    """A `CacheList`."""

    children: tuple["LayoutNode", ...]


LayoutNode = TokenLeaf | StateLeaf | ListNode
Leaf = TokenLeaf | StateLeaf


class Group(NamedTuple):
    """The planes that share one buffer of an extent, `[planes, heads, tokens, dim]`."""

    retention: Retention
    plane: Plane
    members: tuple[tuple[int, int], ...]
    """(leaf, plane of the leaf) of every row of the buffer."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all members."""
        return self.plane.token_bytes * len(self.members)


class StateGroup(NamedTuple):
    """The state slots that share one buffer of a checkpoint, `[slots, *shape]`."""

    slot: Slot
    members: tuple[tuple[int, int], ...]
    """(leaf, slot of the leaf) of every row of the buffer."""


class HoldsRuns(Protocol):
    """A range of an extent, as far as `Layout.valid_length` needs it."""

    @property
    def stop(self) -> int: ...
    def runs(self, group: int) -> Runs: ...


class ValidLength(NamedTuple):
    """A usable length; `reason` says what stops it short of the length asked for, None if nothing
    does.
    """

    length: int
    reason: MissReason | None


class Layout(Struct, frozen=True, dict=True):
    """The caches of one namespace, one node a cache object; fewer caches than layers is fine."""

    nodes: tuple[LayoutNode, ...]

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """All leaves, depth first."""
        return tuple(flatten(self.nodes))

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The buffers of an extent, in order; empty for a model that has state only."""
        return _groups(self.leaves)

    @cached_property
    def state_groups(self) -> tuple[StateGroup, ...]:
        """The buffers of a checkpoint, in order; empty for a model that has KV only."""
        return _state_groups(self.leaves)

    @cached_property
    def places(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Where each (leaf, plane) lies: the group, and the row of its buffer."""
        return {
            member: (index, row)
            for index, group in enumerate(self.groups)
            for row, member in enumerate(group.members)
        }

    @cached_property
    def has_state(self) -> bool:
        """Whether lengths are usable only where a checkpoint is."""
        return any(isinstance(leaf, StateLeaf) for leaf in self.leaves)

    @cached_property
    def has_windows(self) -> bool:
        """Whether some layers need only their last tokens."""
        return any(group.retention.window for group in self.groups)

    @cached_property
    def group_bytes(self) -> tuple[int, ...]:
        """Exact bytes of one token in each of `groups`."""
        return tuple(group.token_bytes for group in self.groups)

    @cached_property
    def bytes_per_token(self) -> int:
        """Exact bytes of one token that all layers hold."""
        return sum(self.group_bytes)

    @cached_property
    def state_bytes(self) -> int:
        """Exact bytes of one checkpoint."""
        return sum(group.slot.nbytes * len(group.members) for group in self.state_groups)

    def valid_length(
        self, ranges: Sequence["HoldsRuns"], checkpoint_lengths: Iterable[int], length: int
    ) -> ValidLength:
        """The greatest usable length <= `length` on a path of ranges, and what stops it short of
        that.

        `ranges` follow each other from position 0; `checkpoint_lengths` are the lengths on that
        path with a checkpoint (ignored unless the layout has state). 0 is always usable.
        """
        limit = min(length, ranges[-1].stop if ranges else 0)
        held = [
            clean_runs(run for part in ranges for run in part.runs(index))
            for index in range(len(self.groups))
        ]
        by_window = self._window_length(held, limit)
        if not self.has_state:
            return ValidLength(by_window, None if by_window == limit else "window_gone")
        reachable = sorted((at for at in checkpoint_lengths if 0 < at <= limit), reverse=True)
        best = next((at for at in reachable if self._window_length(held, at) == at), 0)
        if best == limit:
            return ValidLength(best, None)
        return ValidLength(
            best, "window_gone" if best < max(reachable, default=0) else "no_checkpoint"
        )

    def _window_length(self, held: Sequence[Runs], length: int) -> int:
        before = -1
        while before != length:
            before = length
            for group, runs in zip(self.groups, held, strict=True):
                span, keep = group.retention.span, group.retention.keep
                length = window_length(runs, span, keep, length)
        return length

    def require(self, other: "Layout") -> None:
        """Raise `CacheError`, naming the first difference, unless `other` is this very layout."""
        if self == other:
            return
        if len(self.nodes) != len(other.nodes):
            raise CacheError(f"{len(other.nodes)} caches; the namespace has {len(self.nodes)}")
        for index, (mine, theirs) in enumerate(zip(self.nodes, other.nodes, strict=True)):
            if mine != theirs:
                raise CacheError(
                    f"cache {index} is {describe(theirs)}; the namespace has {describe(mine)}"
                )


def describe(node: LayoutNode) -> str:
    """One line for error messages: the class and its shapes."""
    if isinstance(node, ListNode):
        return f"CacheList({', '.join(describe(child) for child in node.children)})"
    if isinstance(node, StateLeaf):
        slots = (f"{slot.dtype}{list(slot.shape)}" if slot else "None" for slot in node.slots)
        return f"{node.kind}({', '.join(slots)})"
    planes = ", ".join(f"{plane.dtype}[1, {plane.heads}, n, {plane.dim}]" for plane in node.planes)
    window = f", window {node.retention.window}" if node.retention.window else ""
    keep = f", keep {node.retention.keep}" if node.retention.keep else ""
    bits = f", {node.bits} bits in groups of {node.group_size}" if node.bits else ""
    return f"{node.kind}({planes}{window}{keep}{bits})"


def flatten(nodes: Iterable[LayoutNode]) -> Iterator[Leaf]:
    """The leaves of nodes, depth first."""
    for node in nodes:
        if isinstance(node, ListNode):
            yield from flatten(node.children)
        else:
            yield node


def _groups(leaves: Iterable[Leaf]) -> tuple[Group, ...]:
    members: dict[tuple[Retention, Plane], list[tuple[int, int]]] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, TokenLeaf):
            for row, plane in enumerate(leaf.planes):
                members.setdefault((leaf.retention, plane), []).append((index, row))
    return tuple(Group(*key, tuple(rows)) for key, rows in members.items())


def _state_groups(leaves: Iterable[Leaf]) -> tuple[StateGroup, ...]:
    members: dict[Slot, list[tuple[int, int]]] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, StateLeaf):
            for row, slot in enumerate(leaf.slots):
                if slot is not None:
                    members.setdefault(slot, []).append((index, row))
    return tuple(StateGroup(slot, tuple(rows)) for slot, rows in members.items())
