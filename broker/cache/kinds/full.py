"""`KVCache` and `ConcatenateKVCache`: every token is kept, in order."""

from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import ConcatenateKVCache, KVCache

from ..clones import FullClone
from ..layout import TokenLeaf
from ..segments import Segment
from .codec import own_planes, planes_of, require_filled


class KVCodec:
    """mlx-lm's `KVCache`: arrays that grow in steps, filled up to `offset`."""

    stock: type[Any] = KVCache

    def describe(self, cache: Any) -> TokenLeaf:
        name = self.stock.__name__
        held = 0 if cache.keys is None else min(cache.keys.shape[2], cache.values.shape[2])
        require_filled(name, cache.keys, cache.offset, held)
        return TokenLeaf(name, planes_of(name, (cache.keys, cache.values)))

    def offset(self, cache: Any) -> int:
        return int(cache.offset)

    def segments(self, cache: Any) -> list[Segment]:
        return [Segment.over(0, cache.offset, (cache.keys, cache.values))]

    def clone(self, leaf: TokenLeaf, segments: Sequence[Segment], length: int) -> FullClone:
        return FullClone(leaf, segments, length)

    def materialise(self, leaf: TokenLeaf, segments: Sequence[Segment], length: int) -> Any:
        if not length:
            return self.stock()
        keys, values = own_planes(segments, leaf.retention.needed(length))
        return self.stock.from_state(self.state(keys, values, length))

    def state(self, keys: Any, values: Any, length: int) -> tuple[Any, ...]:
        """What the stock class restores itself from."""
        return keys, values, length


class ConcatenateCodec(KVCodec):
    """mlx-lm's `ConcatenateKVCache`: as many tokens as its arrays hold, unless it was trimmed."""

    stock = ConcatenateKVCache

    def state(self, keys: Any, values: Any, length: int) -> tuple[Any, ...]:
        return keys, values
