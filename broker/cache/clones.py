"""Our own cache objects: an immutable prefix that is never copied, and a private tail that grows.

They stand in for mlx-lm's cache classes in stock models. What `update_and_fetch` returns is a
`KVHandle`, which the engine's attention recognises; the arrays of the prefix stay where they are,
whoever else reads them.
"""

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import create_attention_mask

from ..errors import CacheError
from .dtypes import dtype_name
from .layout import TokenLeaf
from .runs import Runs, clean_runs, intersect_runs, show_runs
from .segments import KVHandle, Segment, coverage, covers, owned, select

TAIL_STEP = 64
"""Tails grow by this many tokens."""


class Clone:
    """What all clones share: the prefix segments, the tail behind them, trimming.

    `offset` is the number of tokens seen. The tail holds positions [tail_start, offset).
    Raises `CacheError` if the segments lack positions that `length` needs.
    """

    def __init__(self, leaf: TokenLeaf, segments: Sequence[Segment], length: int) -> None:
        needed = leaf.retention.needed(length)
        if not covers(segments, needed):
            held = intersect_runs(coverage(segments), needed)
            raise CacheError(f"positions {show_runs(needed)} needed, {show_runs(held)} held")
        self.leaf = leaf
        self.offset = length
        self._prefix = select(segments, ((0, length),))
        self._tail: list[mx.array] | None = None
        self._tail_start = length

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[KVHandle, KVHandle]:
        """Append `[1, heads, tokens, dim]` to the tail; return what to attend to, as both keys
        and values.
        """
        self._append((keys, values))
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[KVHandle, KVHandle]:
        """What the newest tokens attend to, as both keys and values."""
        handle = KVHandle(select(self.segments(), self._visible()))
        return handle, handle

    def segments(self) -> tuple[Segment, ...]:
        """Every token still held, ascending: views of the prefix and of the tail."""
        if self._tail is None or self.offset == self._tail_start:
            return self._prefix
        return (*self._prefix, Segment.over(self._tail_start, self.offset, self._tail))

    def is_trimmable(self) -> bool:
        """Whether any number of tokens can be taken off the end."""
        return covers(self.segments(), ((0, self.offset),))

    def trim(self, count: int) -> int:
        """Take `count` tokens off the end; return how many: 0 if what would be needed then is
        gone.
        """
        length = self.offset - min(self.offset, count)
        if not covers(self.segments(), self.leaf.retention.needed(length)):
            return 0
        taken = self.offset - length
        self._cut(length)
        return taken

    def size(self) -> int:
        """Tokens in the cache, as the stock class counts them."""
        return self.offset

    def empty(self) -> bool:
        """Whether no token was seen."""
        return self.offset == 0

    @property
    def nbytes(self) -> int:
        """Bytes of the private tail; the prefix belongs to extents."""
        return sum(plane.nbytes for plane in self._tail or ())

    @property
    def state(self) -> tuple[tuple[mx.array, ...], int]:
        """The tail's arrays and the offset: what is to be evaluated after a step."""
        return tuple(self._tail or ()), self.offset

    def _cut(self, length: int) -> None:
        self.offset = length
        if length < self._tail_start:
            self._tail, self._tail_start = None, length
            self._prefix = select(self._prefix, ((0, length),))

    def _visible(self) -> Runs:
        return ((0, self.offset),)

    def _droppable(self) -> int:
        """Positions before this one will never be asked for again, but for the kept ones."""
        return 0

    def _append(self, planes: Sequence[mx.array]) -> None:
        self._check(planes)
        count, used = planes[0].shape[2], self.offset - self._tail_start
        if self._tail is None or used + count >= self._tail[0].shape[2]:
            used = self._grow(planes, count)
        assert self._tail is not None
        for row, plane in enumerate(planes):
            self._tail[row][:, :, used : used + count] = plane
        self.offset += count

    def _check(self, planes: Sequence[mx.array]) -> None:
        for plane, expected in zip(planes, self.leaf.planes, strict=True):
            got = (dtype_name(plane.dtype), plane.shape[0], plane.shape[1], plane.shape[3])
            if got != (expected.dtype, 1, expected.heads, expected.dim):
                raise CacheError(
                    f"{got[0]}{plane.shape} appended to a {self.leaf.kind} of {expected}"
                )

    def _grow(self, planes: Sequence[mx.array], count: int) -> int:
        """Make room for `count` tokens behind those in use, whose number is returned."""
        first = max(self._tail_start, min(self.offset, self._droppable()))
        recent = select(self.segments(), ((first, self.offset),))
        if first > self._tail_start:
            self._prefix, self._tail_start = self._kept(), first
        used = self.offset - first
        # One token more than needed: assigning over a whole buffer aliases what is assigned.
        capacity = (used + count) // TAIL_STEP * TAIL_STEP + TAIL_STEP
        self._tail = []
        for row, plane in enumerate(planes):
            shape = (*plane.shape[:2], capacity - used, plane.shape[3])
            parts = [*(segment.planes[row] for segment in recent), mx.zeros(shape, plane.dtype)]
            self._tail.append(mx.concatenate(parts, axis=2))
        return used

    def _kept(self) -> tuple[Segment, ...]:
        """The tokens to keep for ever, in buffers that hold nothing else of the tail."""
        kept = select(self._prefix, ((0, self.leaf.retention.keep),))
        if self._tail is None or self._tail_start >= self.leaf.retention.keep:
            return kept
        part = Segment.over(self._tail_start, self.offset, self._tail)
        part = part.narrow(self._tail_start, self.leaf.retention.keep)
        return (*kept, Segment.over(part.start, part.stop, [owned([p], 2) for p in part.planes]))


class FullClone(Clone):
    """Stands in for `KVCache` and `ConcatenateKVCache`: every token is attended to."""

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The mask of the next `N` tokens, as mlx-lm's `KVCache` makes it."""
        mask: mx.array | str | None = create_attention_mask(
            N, offset=self.offset, return_array=return_array, window_size=window_size
        )
        return mask


class QuantizedClone(FullClone):
    """Stands in for `QuantizedKVCache`; `bits` and `group_size` are those of the prefix."""

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.leaf.bits

    @property
    def group_size(self) -> int:
        """Numbers that share a scale and a bias."""
        return self.leaf.group_size

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[KVHandle, KVHandle]:
        """Quantise `[1, heads, tokens, dim]`, append it to the tail; return what to attend to."""
        planes = [
            plane
            for array in (keys, values)
            for plane in mx.quantize(array, group_size=self.group_size, bits=self.bits)
        ]
        self._append(planes)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[KVHandle, KVHandle]:
        """What the newest tokens attend to, as both keys and values."""
        handle = KVHandle(self.segments(), self.group_size, self.bits)
        return handle, handle


class WindowClone(Clone):
    """Stands in for `RotatingKVCache(max_size, keep)`: its logical buffer in temporal order,
    never a ring.

    One token attends to the kept tokens and the last of the window, itself included. Several at
    once attend to up to `max_size` - 1 earlier tokens, under the mask that mlx-lm makes for that
    buffer.
    """

    def __init__(self, leaf: TokenLeaf, segments: Sequence[Segment], length: int) -> None:
        super().__init__(leaf, segments, length)
        self._appended = 1

    @property
    def max_size(self) -> int:
        """Tokens that one token attends to, the kept ones and itself included."""
        return self.leaf.retention.window

    @property
    def keep(self) -> int:
        """First tokens that stay visible."""
        return self.leaf.retention.keep

    def size(self) -> int:
        """Tokens in the cache, as the stock class counts them."""
        return min(self.offset, self.max_size)

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """The mask of the next `N` tokens over `keys_and_values`, as mlx-lm's class makes it."""
        if N == 1:
            if window_size is None or self.offset < window_size or self.max_size <= window_size:
                return None
            seen = min(self.offset + 1, self.max_size)
            return mx.arange(seen) >= seen - window_size
        window_size = window_size or self.max_size
        earlier = min(self.max_size - 1, self.offset)
        if earlier + N > window_size or return_array:
            mask: mx.array = create_causal_mask(N, earlier, window_size=window_size)
            return mask
        return "causal"

    def _append(self, planes: Sequence[mx.array]) -> None:
        super()._append(planes)
        self._appended = planes[0].shape[2]

    def _visible(self) -> Runs:
        kept = min(self.keep, self.offset)
        if self._appended == 1:
            oldest = self.offset - self.leaf.retention.span
        else:
            oldest = self.offset - self._appended - (self.leaf.retention.span - 1)
        return clean_runs([(0, kept), (max(kept, oldest), self.offset)])

    def _droppable(self) -> int:
        return self.offset - self.max_size


class ChunkedClone(Clone):
    """Stands in for `ChunkedKVCache`: holds [start_position, offset), the model masks chunks
    itself.
    """

    def __init__(self, leaf: TokenLeaf, segments: Sequence[Segment], length: int) -> None:
        super().__init__(leaf, segments, length)
        self.start_position = max(0, length - self.chunk_size)

    @property
    def chunk_size(self) -> int:
        """Tokens that `maybe_trim_front` leaves."""
        return self.leaf.retention.window

    def maybe_trim_front(self) -> None:
        """Hide tokens before the last `chunk_size` ones."""
        self.start_position = max(self.start_position, self.offset - self.chunk_size)

    def is_trimmable(self) -> bool:
        """Whether tokens can be taken off the end, down to `start_position`."""
        return True

    def trim(self, count: int) -> int:
        """Take `count` tokens off the end, at most down to `start_position`; return how many."""
        count = min(self.offset - self.start_position, count)
        self._cut(self.offset - count)
        return count

    def size(self) -> int:
        """0: the stock class does not say."""
        return 0

    def _visible(self) -> Runs:
        return ((self.start_position, self.offset),)

    def _droppable(self) -> int:
        return self.start_position
