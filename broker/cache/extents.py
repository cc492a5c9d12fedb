"""Extents: sealed, immutable, packed KV for a run of tokens, and the ranges of them that tree
nodes hold.

An extent has one buffer for each (retention class, dtype, heads, dim) over all layers, so 10,000
nodes of an ordinary model are 10,000 buffers and not 10,000 for each layer, keys and values.
Splitting a node changes ranges only.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import mlx.core as mx
import numpy as np

from ..errors import CacheError
from .dtypes import dtype_of
from .layout import Group, Layout
from .logprobs import LOGPROB_BYTES, Logprobs, unknown
from .runs import Runs, clean_runs, count_runs, intersect_runs
from .segments import Segment, Source, owned, select


class Extent:
    """KV of tokens [start, stop), absolute positions, sealed: never written again.

    `buffers[i]` is `[planes, heads, tokens, dim]` of `layout.groups[i]`, exactly as large as its
    shape says, and evaluated or under way. `runs[i]` are the positions it holds: all of them,
    except that window classes may hold fewer. It lives while ranges refer to it; with the last one
    its buffers go. `logprobs`, where somebody computed them, are those of its tokens.
    """

    __slots__ = ("_live", "buffers", "layout", "logprobs", "runs", "start", "stop")

    def __init__(
        self,
        layout: Layout,
        start: int,
        stop: int,
        buffers: tuple[mx.array, ...],
        runs: tuple[Runs, ...],
    ) -> None:
        self.layout = layout
        self.start = start
        self.stop = stop
        self.buffers = buffers
        self.runs = runs
        self.logprobs: Logprobs | None = None
        self._live: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        """Exact bytes of its buffers and log-probabilities; 0 once they are gone."""
        beside = self.logprobs.nbytes if self.logprobs is not None else 0
        return sum(buffer.nbytes for buffer in self.buffers) + beside

    @property
    def references(self) -> int:
        """How many ranges refer to it."""
        return sum(self._live.values())

    @property
    def is_alive(self) -> bool:
        """Whether ranges refer to it."""
        return bool(self._live)

    @property
    def slack(self) -> int:
        """Bytes that no range refers to."""
        live = clean_runs(self._live)
        return self.nbytes - sum(self.bytes_between(start, stop) for start, stop in live)

    def whole(self) -> "ExtentRange":
        """A new range over all of it."""
        return ExtentRange(self, self.start, self.stop)

    def bytes_between(self, start: int, stop: int) -> int:
        """Exact bytes of tokens [start, stop)."""
        beside = LOGPROB_BYTES * (stop - start) if self.logprobs is not None else 0
        if not self.buffers:
            return beside
        if start == self.start and stop == self.stop:
            return self.nbytes
        within = ((start, stop),)
        return beside + sum(
            size * count_runs(intersect_runs(runs, within))
            for size, runs in zip(self.layout.group_bytes, self.runs, strict=True)
        )

    def keep_logprobs(self, start: int, logprobs: Logprobs) -> None:
        """Take the log-probabilities of the tokens from `start` on that were unknown so far."""
        if self.logprobs is None:
            self.logprobs = unknown(len(self))
        held = self.logprobs[start - self.start :][: len(logprobs)]
        np.copyto(held, logprobs, where=np.isnan(held))

    def segments(self, leaf: int, start: int, stop: int) -> list[Segment]:
        """Tokens [start, stop) of one layer, as far as they are held; views, nothing is copied."""
        where = self.layout.places
        places = [where[leaf, row] for row in range(len(self._planes_of(leaf)))]
        result: list[Segment] = []
        first = 0
        for run_start, run_stop in self.runs[places[0][0]]:
            low, high = max(start, run_start), min(stop, run_stop)
            if low < high:
                at = first + low - run_start
                sources = (Source(self.buffers[group], row, at) for group, row in places)
                result.append(Segment(low, high, tuple(sources)))
            first += run_stop - run_start
        return result

    def check_integrity(self) -> None:
        """Assert that buffers match the runs and that live ranges lie within."""
        for group, buffer, runs in zip(self.layout.groups, self.buffers, self.runs, strict=True):
            assert buffer.shape == (
                len(group.members),
                group.plane.heads,
                count_runs(runs),
                group.plane.dim,
            ), (buffer.shape, group, runs)
            assert intersect_runs(runs, ((self.start, self.stop),)) == runs
        assert self.logprobs is None or self.logprobs.shape == (len(self),)
        assert all(self.start <= start < stop <= self.stop for start, stop in self._live)
        assert 0 <= self.slack <= self.nbytes

    def _planes_of(self, leaf: int) -> tuple[object, ...]:
        planes = getattr(self.layout.leaves[leaf], "planes", ())
        assert planes, f"leaf {leaf} holds no tokens"
        return tuple(planes)

    def _retain(self, start: int, stop: int) -> None:
        self._live[start, stop] = self._live.get((start, stop), 0) + 1

    def _release(self, start: int, stop: int) -> bool:
        left = self._live[start, stop] - 1
        if left:
            self._live[start, stop] = left
            return False
        del self._live[start, stop]
        if not self._live:
            self.buffers, self.logprobs = (), None
        return True


class ExtentRange:
    """Tokens [start, stop) of an extent and one reference to it: what a tree node holds as its
    span.

    Whoever holds it releases it once; releasing again is harmless. Positions are absolute.
    """

    __slots__ = ("_released", "extent", "start", "stop")

    def __init__(self, extent: Extent, start: int, stop: int) -> None:
        assert extent.start <= start < stop <= extent.stop, (start, stop, extent.start, extent.stop)
        self.extent = extent
        self.start = start
        self.stop = stop
        self._released = False
        extent._retain(start, stop)

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        """Exact bytes of its tokens."""
        return self.extent.bytes_between(self.start, self.stop)

    @property
    def logprobs(self) -> Logprobs | None:
        """A view of those of its tokens; None if the extent has none."""
        if self.extent.logprobs is None:
            return None
        return self.extent.logprobs[self.start - self.extent.start :][: len(self)]

    def split(self, at: int) -> tuple["ExtentRange", "ExtentRange"]:
        """The parts before and from absolute position `at`; no array is touched and this range is
        released.
        """
        parts = ExtentRange(self.extent, self.start, at), ExtentRange(self.extent, at, self.stop)
        self.release()
        return parts

    def retain(self) -> "ExtentRange":
        """Another reference to the same tokens, to be released on its own."""
        return ExtentRange(self.extent, self.start, self.stop)

    def release(self) -> bool:
        """Give the reference back; the extent's buffers go with the last one.

        Whether it was the last range over exactly these tokens: else no byte became slack.
        """
        if self._released:
            return False
        self._released = True
        return self.extent._release(self.start, self.stop)

    def segments(self, leaf: int) -> list[Segment]:
        """The tokens of one layer, as far as they are held (window layers may miss some)."""
        return self.extent.segments(leaf, self.start, self.stop)

    def runs(self, group: int) -> Runs:
        """The positions it holds for `layout.groups[group]`."""
        return intersect_runs(self.extent.runs[group], ((self.start, self.stop),))


def compact(ranges: Sequence[ExtentRange], *, windows_at_end: bool = False) -> list[ExtentRange]:
    """Copy consecutive ranges of one path into one new extent; return one range for each, in
    order.

    The given ranges are released, so their extents shrink to what others still refer to. With
    `windows_at_end`, window classes keep only what the last position needs. The new extent is a
    second copy until the old buffers go. Raises `CacheError` if the ranges are empty, not
    consecutive, or of different layouts.
    """
    layout, start, stop = _check_path(ranges)
    runs = []
    for index, group in enumerate(layout.groups):
        held = clean_runs(run for part in ranges for run in part.runs(index))
        wanted = group.retention.needed(stop) if windows_at_end else held
        runs.append(intersect_runs(held, wanted))
    extent = pack(
        layout,
        start,
        stop,
        tuple(runs),
        lambda leaf: [segment for part in ranges for segment in part.segments(leaf)],
    )
    fresh = [ExtentRange(extent, part.start, part.stop) for part in ranges]
    for part in ranges:
        if part.logprobs is not None:
            extent.keep_logprobs(part.start, part.logprobs)
        part.release()
    return fresh


def pack(
    layout: Layout, start: int, stop: int, runs: tuple[Runs, ...], segments: "SegmentsOf"
) -> Extent:
    """Copy tokens into a new extent: `runs[i]` of `layout.groups[i]`, from `segments(leaf)` of
    every leaf.

    One copy, straight into the packed buffers. It is under way when this returns, so that whoever
    reads them in this thread waits for nothing; another thread gets them evaluated.
    """
    found = {leaf: segments(leaf) for group in layout.groups for leaf, _ in group.members}
    buffers = tuple(
        _pack_group(group, held, found) for group, held in zip(layout.groups, runs, strict=True)
    )
    mx.async_eval(buffers)
    return Extent(layout, start, stop, buffers, runs)


SegmentsOf = Callable[[int], Sequence[Segment]]


def _pack_group(group: Group, runs: Runs, found: dict[int, Sequence[Segment]]) -> mx.array:
    rows = [
        # An index would copy, even into an axis of one.
        [mx.squeeze(segment.planes[plane], 0) for segment in select(found[leaf], runs)]
        for leaf, plane in group.members
    ]
    if not runs:
        shape = (len(rows), group.plane.heads, 0, group.plane.dim)
        return mx.zeros(shape, dtype_of(group.plane.dtype))
    if all(len(row) == 1 for row in rows):
        return mx.stack([row[0] for row in rows]) if len(rows) > 1 else owned([rows[0][0][None]], 2)
    return owned([mx.concatenate(row, axis=1)[None] for row in rows], 0)


def _check_path(ranges: Sequence[ExtentRange]) -> tuple[Layout, int, int]:
    if not ranges:
        raise CacheError("0 ranges to compact; at least 1 is needed")
    layout = ranges[0].extent.layout
    for before, after in pairwise(ranges):
        if before.stop != after.start:
            raise CacheError(f"a range that ends at {before.stop} before one from {after.start}")
        layout.require(after.extent.layout)
    return layout, ranges[0].start, ranges[-1].stop
