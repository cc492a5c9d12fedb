"""Tails of running rows: for each layer one slab of keys and one of values, a region for each row.

A slab is `[1, heads, tokens, dim]`. A tail is a run of consecutive tokens in it, at the same place
in all layers, so slabs waste no room on the difference between short and long tails. Joining
writes the row's own region and leaving frees it. When some region is full, or a new one does not
fit, everything moves into new slabs at once, one operation a slab; that happens once in several
steps, because every region gets some room to grow.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from msgspec import Struct

from ..cache.dtypes import dtype_of
from ..cache.layout import Layout, TokenLeaf
from ..cache.segments import Segment, Source
from .partials import on_cpu

LEAST_ROOM = 8
"""Tokens that a region can grow by at least, before everything has to move."""

ROOM_SHARE = 5
"""Room to grow is one part in so many of the mean tail."""

SIZE_STEPS = 32
"""Sizes of slabs between two powers of two: few shapes, and at most 1/32 wasted."""

SPARE_SHARE = 2
"""Slabs become smaller when less than one part in so many of them is in regions."""

WIDE = mx.uint64
"""The widest type that tokens can be moved in."""


class SlabStatistics(Struct, frozen=True, kw_only=True):
    """Exact bytes of all slabs, those of them that tokens fill, and how often all tails moved."""

    bytes: int = 0
    used_bytes: int = 0
    tails: int = 0
    moves: int = 0


class Tail:
    """One row's region: tokens [begin, begin + used) of every slab, room up to `capacity`.

    `limit` is the most tokens that it will ever hold, `reserve` how many it gets room for at once.
    """

    __slots__ = ("begin", "capacity", "limit", "reserve", "used")

    def __init__(self, limit: int, reserve: int = 0) -> None:
        self.begin = 0
        self.capacity = 0
        self.used = 0
        self.limit = limit
        self.reserve = reserve


class TailSlabs:
    """The slabs of all token leaves of a layout. Nothing is allocated while there are no tails."""

    def __init__(self, layout: Layout) -> None:
        self._leaves = {
            index: leaf for index, leaf in enumerate(layout.leaves) if isinstance(leaf, TokenLeaf)
        }
        self._token_bytes = layout.bytes_per_token
        self._planes: dict[int, list[mx.array]] = {}
        self._tails: list[Tail] = []
        self._moves = 0
        self._longest = 1
        self.tokens = 0

    @property
    def nbytes(self) -> int:
        """Exact bytes of all slabs."""
        return self.tokens * self._token_bytes

    @property
    def arrays(self) -> list[mx.array]:
        """All slabs: what is to be evaluated after a step."""
        return [plane for planes in self._planes.values() for plane in planes]

    def statistics(self) -> SlabStatistics:
        """What the slabs hold and cost."""
        used = sum(tail.used for tail in self._tails)
        return SlabStatistics(
            bytes=self.nbytes,
            used_bytes=used * self._token_bytes,
            tails=len(self._tails),
            moves=self._moves,
        )

    def make_room(self, added: Sequence[tuple[Tail, int]]) -> bool:
        """Put `count` tokens in front of each tail of `added`, new tails among them, and give every
        tail room for one token more, new ones for all of their `reserve`; whether tails moved. The
        contents of the new tokens are written with `fill`.
        """
        if not self._fits(added):
            self._move(dict(added))
            return True
        return False

    def fill(self, tail: Tail, leaf: int, first: int, planes: Sequence[mx.array]) -> None:
        """Write keys and values `[1, heads, n, dim]` into a tail, from its token `first` on."""
        start = tail.begin + first
        for slab, plane in enumerate(planes):
            stop = start + plane.shape[2]
            assert tail.begin <= start < stop <= tail.begin + tail.capacity
            self._planes[leaf][slab][:, :, start:stop] = plane

    def write(self, leaf: int, place: mx.array, new: Sequence[mx.array]) -> None:
        """Write one token of every row, keys and values `[rows, heads, 1, dim]`, at the tokens
        `place` `[1, heads, rows, dim]` of the slabs.
        """
        slabs = self._planes[leaf]
        for index, plane in enumerate(new):
            # Ten times cheaper on CUDA than assigning at indices, and in place where nobody reads.
            moved = plane.transpose(2, 1, 0, 3)
            slabs[index] = mx.put_along_axis(slabs[index], place, moved, axis=2)

    def view(self, leaf: int) -> tuple[mx.array, mx.array]:
        """Keys and values as `[slots, heads, capacity, dim]`, where slot s begins at token s: the
        slots overlap, nothing is copied. On a CPU, which multiplies nothing else fast, they are
        float32: of 16-bit slabs that is a copy, once a layer.
        """
        keys, values = (self._view(plane) for plane in self._planes[leaf])
        return keys, values

    def segment(self, leaf: int, tail: Tail, position: int, first: int = 0) -> Segment:
        """A tail's tokens from `first` on as a segment, its token 0 at that absolute position."""
        sources = tuple(Source(plane, 0, tail.begin + first) for plane in self._planes[leaf])
        return Segment(position + first, position + tail.used, sources)

    def give_up(self, tail: Tail, count: int) -> None:
        """Free the first tokens of a tail; the others stay where they are."""
        assert count <= tail.used
        tail.begin += count
        tail.capacity -= count
        tail.used -= count
        tail.limit -= count
        tail.reserve -= count
        self._measure()

    def snapshot(self) -> dict[int, list[mx.array]]:
        """The arrays as they are, for `restore`. While it is kept, writing copies whole slabs."""
        return {leaf: list(planes) for leaf, planes in self._planes.items()}

    def restore(self, planes: dict[int, list[mx.array]]) -> None:
        """Undo what was written since a `snapshot`; no tail may have moved."""
        self._planes = planes

    def free(self, tail: Tail) -> None:
        """Give a tail's region back."""
        self._tails.remove(tail)
        self._measure()
        if not self._tails:
            self._planes, self.tokens = {}, 0

    def check_integrity(self) -> None:
        """Assert that regions lie within the slabs and do not overlap."""
        reached = 0
        for tail in sorted(self._tails, key=lambda tail: tail.begin):
            assert reached <= tail.begin
            assert 0 <= tail.used <= tail.capacity
            reached = tail.begin + tail.capacity
        assert reached <= self.tokens
        assert all(plane.shape[2] == self.tokens for plane in self.arrays)

    def _view(self, plane: mx.array) -> mx.array:
        if on_cpu():
            plane = plane.astype(mx.float32)
        _, heads, tokens, dim = plane.shape
        capacity = self._longest
        shape, strides = (tokens - capacity + 1, heads, capacity, dim), (dim, tokens * dim, dim, 1)
        return mx.as_strided(plane, shape, strides)

    def _fits(self, added: Sequence[tuple[Tail, int]]) -> bool:
        """Give new tails regions where that takes no moving; whether everything has room."""
        known = set(self._tails)
        if any(tail.used >= tail.capacity for tail in self._tails) or self._overhangs(
            self._longest
        ):
            return False
        if any(tail in known for tail, count in added if count):
            return False
        if self._is_spacious(added):
            return False
        room = self._room([(tail.used, tail) for tail in known] + [(n, t) for t, n in added])
        if all(self._settle(tail, count, room) for tail, count in added if tail not in known):
            return True
        for tail in [tail for tail in self._tails if tail not in known]:
            self._tails.remove(tail)
            tail.capacity = tail.used = 0
        self._measure()
        return False

    def _is_spacious(self, added: Sequence[tuple[Tail, int]]) -> bool:
        """Whether most of the slabs was freed, which the memory ledger has given to others."""
        new = sum(max(count, tail.reserve) for tail, count in added if not tail.capacity)
        taken = new + sum(tail.capacity for tail in self._tails)
        return self.tokens > SPARE_SHARE * rounded(taken)

    def _overhangs(self, longest: int) -> bool:
        """Whether a view so long does not fit behind every begin: a tail that gave up its front
        begins later.
        """
        return any(tail.begin + longest > self.tokens for tail in self._tails)

    def _measure(self) -> None:
        self._longest = max((tail.capacity for tail in self._tails), default=1)

    def _settle(self, tail: Tail, count: int, room: int) -> bool:
        """Find a hole for a new tail; its longest neighbour must still fit behind its begin."""
        capacity = _capacity(tail, count, room)
        longest, begin = max(capacity, self._longest), 0
        for other in [*sorted(self._tails, key=lambda each: each.begin), None]:
            hole = (other.begin if other is not None else self.tokens) - begin
            if hole >= capacity and begin + longest <= self.tokens:
                break
            begin = other.begin + other.capacity if other is not None else begin
        else:
            return False
        if self._overhangs(longest):
            return False
        tail.begin, tail.capacity, tail.used = begin, capacity, count
        self._tails.append(tail)
        self._measure()
        return True

    def _room(self, sizes: Sequence[tuple[int, Tail]]) -> int:
        mean = sum(size for size, _ in sizes) // max(1, len(sizes))
        return max(LEAST_ROOM, mean // ROOM_SHARE)

    def _move(self, added: dict[Tail, int]) -> None:
        """New slabs, with every tail in a region that has room; shortest first, so that a view as
        long as the longest region fits behind every begin.
        """
        tails = [*self._tails, *(tail for tail in added if tail not in self._tails)]
        sizes = [(tail.used + added.get(tail, 0), tail) for tail in tails]
        room = self._room(sizes)
        source: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
        placed: list[tuple[Tail, int, int, int]] = []
        begin = 0
        regions = sorted(
            ((_capacity(tail, size, room), size, tail) for size, tail in sizes),
            key=lambda region: region[0],
        )
        for capacity, size, tail in regions:
            index = np.zeros(capacity, np.int32)
            ahead = added.get(tail, 0)
            index[ahead:size] = np.arange(tail.begin, tail.begin + tail.used)
            source.append(index)
            placed.append((tail, begin, capacity, size))
            begin += capacity
        source.append(np.zeros(rounded(begin) - begin, np.int32))
        # First what can fail: the other rows' tails must stay where they are then.
        self._gather(np.concatenate(source))
        for tail, first, capacity, used in placed:
            tail.begin, tail.capacity, tail.used = first, capacity, used
        self._tails = tails
        self._measure()
        self._moves += 1

    def _gather(self, source: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        index = mx.array(source)
        planes: dict[int, list[mx.array]] = {}
        for leaf, description in self._leaves.items():
            old = self._planes.get(leaf)
            if old is None:
                planes[leaf] = [
                    mx.zeros((1, plane.heads, len(source), plane.dim), dtype_of(plane.dtype))
                    for plane in description.planes
                ]
            else:
                planes[leaf] = [_take(plane, index) for plane in old]
        # Apart from the step that follows: a GPU replays a step whose graph it has seen before.
        mx.async_eval(*planes.values())
        self._planes, self.tokens = planes, len(source)


def _take(plane: mx.array, index: mx.array) -> mx.array:
    """The tokens of `index`, in few pieces: a gather takes its time by the piece."""
    wide = WIDE if plane.shape[3] * plane.itemsize % WIDE.size == 0 else plane.dtype
    return mx.take(plane.view(wide), index, axis=2).view(plane.dtype)


def _capacity(tail: Tail, used: int, room: int) -> int:
    return min(max(used + room, tail.reserve), max(tail.limit, used + 1))


def rounded(tokens: int) -> int:
    """The size of slabs for so many tokens: one of `SIZE_STEPS` between two powers of two."""
    step = max(1, (1 << max(1, tokens).bit_length() - 1) // SIZE_STEPS)
    return max(SIZE_STEPS, -(-tokens // step) * step)
