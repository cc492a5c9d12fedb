"""`QuantizedKVCache`: codes, scales and biases of keys and of values, any bits and group size."""

from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import QuantizedKVCache

from ..clones import QuantizedClone
from ..layout import TokenLeaf
from ..segments import Segment
from .codec import own_planes, planes_of, require_filled


class QuantizedCodec:
    """Six planes: codes, scales and biases of the keys, then of the values."""

    def describe(self, cache: Any) -> TokenLeaf:
        arrays = self._arrays(cache)
        held = min((array.shape[2] for array in arrays), default=0)
        require_filled("QuantizedKVCache", cache.keys, cache.offset, held)
        planes = planes_of("QuantizedKVCache", arrays)
        return TokenLeaf("QuantizedKVCache", planes, group_size=cache.group_size, bits=cache.bits)

    def offset(self, cache: Any) -> int:
        return int(cache.offset)

    def segments(self, cache: Any) -> list[Segment]:
        return [Segment.over(0, cache.offset, self._arrays(cache))]

    def clone(self, leaf: TokenLeaf, segments: Sequence[Segment], length: int) -> QuantizedClone:
        return QuantizedClone(leaf, segments, length)

    def materialise(self, leaf: TokenLeaf, segments: Sequence[Segment], length: int) -> Any:
        if not length:
            return QuantizedKVCache(leaf.group_size, leaf.bits)
        planes = own_planes(segments, leaf.retention.needed(length))
        half = len(planes) // 2
        # Lists, because the stock class assigns into them.
        state = planes[:half], planes[half:], length, leaf.group_size, leaf.bits
        return QuantizedKVCache.from_state(state)

    def _arrays(self, cache: Any) -> tuple[Any, ...]:
        return () if cache.keys is None else (*cache.keys, *cache.values)
