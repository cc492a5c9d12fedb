"""`ArraysCache`: states of SSM and convolution layers, valid at one length, kept in checkpoints."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from ...errors import CacheError
from ..dtypes import dtype_name
from ..layout import Layout, Slot, StateLeaf
from ..segments import owned


class Checkpoint:
    """The state leaves of one length, packed: `buffers[i]` is `[slots, *shape]` of
    `layout.state_groups[i]`.
    """

    __slots__ = ("buffers", "layout")

    def __init__(self, layout: Layout, buffers: tuple[mx.array, ...]) -> None:
        self.layout = layout
        self.buffers = buffers

    @classmethod
    def empty(cls, layout: Layout) -> "Checkpoint":
        """The state before the first token: every slot is None."""
        return cls(layout, ())

    @property
    def nbytes(self) -> int:
        """Exact bytes of its buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def caches(self) -> dict[int, Any]:
        """A stock `ArraysCache` for every state leaf; its arrays are views that stepping
        replaces.
        """
        result = {
            index: ArraysCache(len(leaf.slots))
            for index, leaf in enumerate(self.layout.leaves)
            if isinstance(leaf, StateLeaf)
        }
        for group, buffer in zip(self.layout.state_groups, self.buffers, strict=False):
            for row, (leaf, slot) in enumerate(group.members):
                result[leaf][slot] = buffer[row]
        return result


def describe_arrays(cache: Any) -> StateLeaf:
    """The leaf of an `ArraysCache`; raises `CacheError` unless it is one whole row."""
    slots, left_padding, lengths = cache.state
    for name, padding in (("lengths", lengths), ("left padding", left_padding)):
        if padding is not None and padding.max().item() > 0:
            raise CacheError(f"ArraysCache is in the middle of a padded batch ({name} {padding})")
    for slot in slots:
        if slot is not None and (not slot.ndim or slot.shape[0] != 1):
            raise CacheError(f"ArraysCache holds {slot.shape}; caches are stored one row each")
    return StateLeaf(
        "ArraysCache",
        tuple(slot if slot is None else Slot(dtype_name(slot.dtype), slot.shape) for slot in slots),
    )


def pack_states(layout: Layout, leaves: Sequence[Any]) -> Checkpoint:
    """Deep, evaluated copies of all state leaves; `leaves` are the cache objects of
    `layout.leaves`.
    """
    buffers = tuple(
        owned([leaves[leaf][slot][None] for leaf, slot in group.members], 0)
        for group in layout.state_groups
    )
    mx.eval(buffers)
    return Checkpoint(layout, buffers)


def copy_arrays(cache: Any) -> Any:
    """An `ArraysCache` of its own arrays."""
    copy = ArraysCache(len(cache.state[0]))
    for index, slot in enumerate(cache.state[0]):
        copy[index] = slot if slot is None else owned([slot], 0)
    mx.eval(copy.state)
    return copy
