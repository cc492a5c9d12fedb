"""`RotatingKVCache`: a ring of the last tokens, after the first `keep` ones, before and after it
wrapped.
"""

from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import RotatingKVCache

from ...errors import CacheError
from ..clones import WindowClone
from ..layout import Retention, TokenLeaf
from ..segments import Segment
from .codec import own_planes, planes_of, require_filled


class RotatingCodec:
    """Reads the ring through its public `state`: keys, values, offset, keep, size, write index."""

    def describe(self, cache: Any) -> TokenLeaf:
        keys, values, offset, keep, size, index = cache.state
        require_filled("RotatingKVCache", keys, offset, offset)
        rows = min(keys.shape[2], values.shape[2])
        if index > rows or (rows < offset < size and index < offset):
            raise CacheError(
                f"RotatingKVCache is at offset {offset}, index {index}, with {rows} tokens"
            )
        planes = planes_of("RotatingKVCache", (keys, values))
        return TokenLeaf("RotatingKVCache", planes, Retention(size, keep))

    def offset(self, cache: Any) -> int:
        return int(cache.offset)

    def segments(self, cache: Any) -> list[Segment]:
        keys, values, offset, keep, _, index = cache.state
        arrays, rows = (keys, values), keys.shape[2]
        wrapped = index < min(offset, rows)
        held = rows if wrapped else index
        if held >= offset:
            return [Segment.over(0, offset, arrays)]
        oldest = offset - (held - keep)
        result = [Segment.over(0, keep, arrays)] if keep else []
        if not wrapped:
            return [*result, Segment.over(oldest, offset, arrays, keep)]
        turn = oldest + rows - index
        result.append(Segment.over(oldest, turn, arrays, index))
        if turn < offset:
            result.append(Segment.over(turn, offset, arrays, keep))
        return result

    def clone(self, leaf: TokenLeaf, segments: Sequence[Segment], length: int) -> WindowClone:
        return WindowClone(leaf, segments, length)

    def materialise(self, leaf: TokenLeaf, segments: Sequence[Segment], length: int) -> Any:
        window, keep = leaf.retention.window, leaf.retention.keep
        if not length:
            return RotatingKVCache(window, keep)
        keys, values = own_planes(segments, leaf.retention.needed(length))
        rows = keys.shape[2]
        return RotatingKVCache.from_state((keys, values, length, keep, window, rows))
