"""What a codec of one mlx-lm cache class does, and how codecs read arrays."""

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx

from ...errors import CacheError
from ..dtypes import dtype_name
from ..layout import Plane, TokenLeaf
from ..runs import Runs, intersect_runs, show_runs
from ..segments import Segment, coverage, join_planes, owned, select


class TokenCodec(Protocol):
    """Reads and builds one class of KV cache. All offsets and positions are tokens from the start
    of the text.
    """

    def describe(self, cache: Any) -> TokenLeaf:
        """The leaf of a filled stock cache; raises `CacheError` if it is malformed or not of
        batch size 1.
        """

    def offset(self, cache: Any) -> int:
        """How many tokens the stock cache has seen."""

    def segments(self, cache: Any) -> list[Segment]:
        """Every token that the stock cache still holds, ascending: views, nothing is copied."""

    def clone(self, leaf: TokenLeaf, segments: Sequence[Segment], length: int) -> Any:
        """A cache of ours at offset `length` that copies none of `segments`."""

    def materialise(self, leaf: TokenLeaf, segments: Sequence[Segment], length: int) -> Any:
        """A stock cache at offset `length` whose arrays are its own."""


def planes_of(name: str, arrays: Sequence[mx.array]) -> tuple[Plane, ...]:
    """The planes of `[1, heads, tokens, dim]` arrays; raises `CacheError` on another rank or
    batch size.
    """
    for array in arrays:
        if array.ndim != 4:
            raise CacheError(f"{name} holds an array of {array.ndim} dimensions; 4 are expected")
        if array.shape[0] != 1:
            raise CacheError(f"{name} holds {array.shape[0]} rows; caches are stored one row each")
    return tuple(Plane(dtype_name(array.dtype), array.shape[1], array.shape[3]) for array in arrays)


def require_filled(name: str, keys: object, offset: int, held: int) -> None:
    """Raise `CacheError` if the cache is empty, or claims more tokens than its arrays hold."""
    if keys is None or not offset:
        raise CacheError(f"{name} is empty; a layout needs at least 1 token")
    if held < offset:
        raise CacheError(f"{name} is at offset {offset}, its arrays hold {held} tokens")


def own_planes(segments: Sequence[Segment], runs: Runs) -> list[mx.array]:
    """Evaluated copies of the positions in `runs`, one array a plane; raises `CacheError` if some
    are missing.
    """
    held = intersect_runs(coverage(segments), runs)
    if held != runs:
        raise CacheError(f"positions {show_runs(runs)} needed, {show_runs(held)} held")
    parts = [segment.planes for segment in select(segments, runs)]
    if len(parts) > 1:
        planes = list(join_planes(parts))
    else:
        planes = [owned([plane], 2) for plane in parts[0]]
    mx.eval(planes)
    return planes
