"""Every mlx-lm cache class that the prompt cache can cut, join and clone, one codec each.

The functions here take the list of cache objects that a model uses, stock ones or clones, for one
row. Positions are absolute. Nothing changes what it is given; copies are evaluated, or under way,
when it returns. What cannot be taken raises `CacheError`, a class that no codec knows
`UnsupportedCacheKind`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from ...errors import CacheError, UnsupportedCacheKind
from ..clones import Clone
from ..extents import Extent, ExtentRange, pack
from ..layout import Layout, LayoutNode, ListNode, StateLeaf, TokenLeaf
from ..runs import Runs, intersect_runs, show_runs
from ..segments import Segment, coverage
from .arrays import Checkpoint, copy_arrays, describe_arrays, pack_states
from .chunked import ChunkedCodec
from .codec import TokenCodec
from .full import ConcatenateCodec, KVCodec
from .quantized import QuantizedCodec
from .rotating import RotatingCodec

__all__ = [
    "Checkpoint",
    "clone",
    "held_runs",
    "layout_of",
    "materialise",
    "nest",
    "seal",
    "segments_of",
    "snapshot",
    "states_of",
    "validate",
]

CODECS: dict[type[Any], TokenCodec] = {
    KVCache: KVCodec(),
    ConcatenateKVCache: ConcatenateCodec(),
    QuantizedKVCache: QuantizedCodec(),
    RotatingKVCache: RotatingCodec(),
    ChunkedKVCache: ChunkedCodec(),
}
BY_NAME = {stock.__name__: codec for stock, codec in CODECS.items()}


def layout_of(caches: Sequence[Any]) -> Layout:
    """The layout of filled caches; an empty stock cache has none (its shapes are not known yet)."""
    if not caches:
        raise CacheError("0 caches; a layout needs at least 1")
    return Layout(tuple(_describe(cache) for cache in caches))


def validate(caches: Sequence[Any], layout: Layout, length: int) -> None:
    """Raise `CacheError`, with the numbers, unless `caches` have `layout` and hold exactly
    `length` tokens.
    """
    layout.require(layout_of(caches))
    for index, cache in enumerate(_flatten(caches)):
        offset = _offset(cache)
        if offset is not None and offset != length:
            raise CacheError(f"cache {index} is at offset {offset}; {length} tokens were given")


def seal(caches: Sequence[Any], layout: Layout, start: int, stop: int) -> Extent:
    """Copy tokens [start, stop) into a new extent.

    Window layers contribute what they still hold of it. Raises `CacheError` if a layer that needs
    all tokens lacks some, or is of another layout.
    """
    if not 0 <= start < stop:
        raise CacheError(f"cannot seal tokens [{start}, {stop})")
    layout.require(layout_of(caches))
    found = [_segments(cache) for cache in _flatten(caches)]
    wanted: Runs = ((start, stop),)
    runs = tuple(intersect_runs(wanted, held) for held in held_runs(caches, layout))
    for group, held in zip(layout.groups, runs, strict=True):
        if held != wanted and not group.retention.window:
            raise CacheError(f"tokens {show_runs(wanted)} asked for, {show_runs(held)} held")
    return pack(layout, start, stop, runs, found.__getitem__)


def held_runs(caches: Sequence[Any], layout: Layout) -> tuple[Runs, ...]:
    """The positions that the layers of each of `layout.groups` hold, all of them."""
    found = [coverage(_segments(cache)) for cache in _flatten(caches)]
    result = []
    for group in layout.groups:
        held = found[group.members[0][0]]
        for leaf, _ in group.members[1:]:
            held = intersect_runs(held, found[leaf])
        result.append(held)
    return tuple(result)


def segments_of(caches: Sequence[Any]) -> list[Sequence[Segment]]:
    """What every leaf of filled caches holds, ascending: views; nothing for a state leaf."""
    return [_segments(cache) for cache in _flatten(caches)]


def states_of(caches: Sequence[Any]) -> list[list[mx.array | None]]:
    """The arrays of every leaf, as they are; none for a token leaf."""
    return [
        list(cache.state[0]) if isinstance(cache, ArraysCache) else [] for cache in _flatten(caches)
    ]


def nest(layout: Layout, leaves: Iterable[Any]) -> list[Any]:
    """Cache objects of all leaves, depth first, as the list that the model takes."""
    return _nest(layout.nodes, iter(leaves))


def snapshot(caches: Sequence[Any], layout: Layout) -> Checkpoint | None:
    """Owned copies of the state leaves as they are now, or None if the layout has none."""
    if not layout.has_state:
        return None
    layout.require(layout_of(caches))
    return pack_states(layout, list(_flatten(caches)))


def clone(
    layout: Layout, ranges: Sequence[ExtentRange], checkpoint: Checkpoint | None, length: int
) -> list[Any]:
    """Caches at offset `length` over ranges that follow each other from position 0; copies
    nothing.

    The clones keep buffers alive, not references: whoever leases them retains the ranges. Raises
    `CacheError` if the ranges or the checkpoint do not make `length` usable. With `length` 0 the
    caches are empty.
    """
    reached = 0
    for part in ranges:
        if part.start != reached:
            raise CacheError(f"a range from {part.start} where {reached} was reached")
        reached = part.stop
    if reached < length:
        raise CacheError(f"{length} tokens wanted, the ranges hold {reached}")
    if length and layout.has_state and checkpoint is None:
        raise CacheError(
            f"{length} tokens wanted; the layout has state, and no checkpoint is given"
        )
    states = (checkpoint if length and checkpoint else Checkpoint.empty(layout)).caches()
    caches: list[Any] = []
    for index, leaf in enumerate(layout.leaves):
        if isinstance(leaf, StateLeaf):
            caches.append(states[index])
            continue
        segments = [segment for part in ranges for segment in part.segments(index)]
        caches.append(BY_NAME[leaf.kind].clone(leaf, segments, length))
    return _nest(layout.nodes, iter(caches))


def materialise(caches: Sequence[Any]) -> list[Any]:
    """Stock mlx-lm caches in the same state, every array their own; clones and stock caches alike.

    Window layers get what their next token needs.
    """
    leaves = layout_of(caches)
    copies = (
        copy_arrays(cache) if isinstance(cache, ArraysCache) else _materialise(cache, leaf)
        for cache, leaf in zip(_flatten(caches), leaves.leaves, strict=True)
    )
    return _nest(leaves.nodes, copies)


def _materialise(cache: Any, leaf: Any) -> Any:
    assert isinstance(leaf, TokenLeaf)
    return BY_NAME[leaf.kind].materialise(leaf, _segments(cache), cache.offset)


def _describe(cache: Any) -> LayoutNode:
    if isinstance(cache, Clone):
        return cache.leaf
    if type(cache) is CacheList:
        return ListNode(tuple(_describe(child) for child in cache.caches))
    if type(cache) is ArraysCache:
        return describe_arrays(cache)
    return _codec(cache).describe(cache)


def _codec(cache: Any) -> TokenCodec:
    codec = CODECS.get(type(cache))
    if codec is None:
        known = ", ".join([*BY_NAME, "ArraysCache", "CacheList"])
        raise UnsupportedCacheKind(f"no codec for {type(cache).__name__}; known: {known}")
    return codec


def _offset(cache: Any) -> int | None:
    if isinstance(cache, ArraysCache):
        return None
    return cache.offset if isinstance(cache, Clone) else _codec(cache).offset(cache)


def _segments(cache: Any) -> Sequence[Segment]:
    if isinstance(cache, ArraysCache):
        return ()
    return cache.segments() if isinstance(cache, Clone) else _codec(cache).segments(cache)


def _flatten(caches: Sequence[Any]) -> Iterator[Any]:
    for cache in caches:
        if type(cache) is CacheList:
            yield from _flatten(cache.caches)
        else:
            yield cache


def _nest(nodes: Sequence[LayoutNode], leaves: Iterator[Any]) -> list[Any]:
    return [
        CacheList(*_nest(node.children, leaves)) if isinstance(node, ListNode) else next(leaves)
        for node in nodes
    ]
