"""`ChunkedKVCache`: attention within chunks; as a window it needs the last `chunk_size` tokens."""

from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import ChunkedKVCache

from ..clones import ChunkedClone
from ..layout import Retention, TokenLeaf
from ..segments import Segment
from .codec import own_planes, planes_of, require_filled


class ChunkedCodec:
    """Arrays that hold [start_position, offset)."""

    def describe(self, cache: Any) -> TokenLeaf:
        held = 0
        if cache.keys is not None:
            held = cache.start_position + min(cache.keys.shape[2], cache.values.shape[2])
        require_filled("ChunkedKVCache", cache.keys, cache.offset, held)
        planes = planes_of("ChunkedKVCache", (cache.keys, cache.values))
        return TokenLeaf("ChunkedKVCache", planes, Retention(cache.chunk_size))

    def offset(self, cache: Any) -> int:
        return int(cache.offset)

    def segments(self, cache: Any) -> list[Segment]:
        return [Segment.over(cache.start_position, cache.offset, (cache.keys, cache.values))]

    def clone(self, leaf: TokenLeaf, segments: Sequence[Segment], length: int) -> ChunkedClone:
        return ChunkedClone(leaf, segments, length)

    def materialise(self, leaf: TokenLeaf, segments: Sequence[Segment], length: int) -> Any:
        size = leaf.retention.window
        if not length:
            return ChunkedKVCache(size)
        keys, values = own_planes(segments, leaf.retention.needed(length))
        start = length - keys.shape[2]
        return ChunkedKVCache.from_state((keys, values, length, size, start))
