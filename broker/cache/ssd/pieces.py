"""What a write holds, piece by piece, as evaluated arrays that the writer's thread can read.

In memory that the host reads as it is, a piece is the extent itself, which nobody ever writes to;
elsewhere it is a copy made on the device. Everything here runs in the thread that owns MLX, except
`Rows.array`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..cold import ColdWrite
from ..extents import ExtentRange
from ..kinds import layout_of, seal, snapshot
from ..layout import Layout
from ..runs import Runs, count_runs, intersect_runs

_RAW = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


class Rows(NamedTuple):
    """Rows [first, first + size) of an array of plain numbers, as a file holds them."""

    raw: mx.array
    first: int
    size: int
    is_token_major: bool

    def array(self) -> NDArray[Any]:
        """`[size, ...]`, token-major for KV: a view of memory. May be called in any thread."""
        whole: NDArray[Any] = np.array(self.raw, copy=False)
        if not self.is_token_major:
            whole = whole.transpose(2, 0, 1, 3)
        return whole[self.first : self.first + self.size]


class Piece(NamedTuple):
    """Tokens [start, stop), one `Rows` a group; a checkpoint alone has no tokens."""

    start: int
    stop: int
    held: tuple[Runs, ...]
    rows: tuple[Rows, ...]

    def runs(self, group: int) -> Runs:
        """The positions it holds for a group of the layout."""
        return self.held[group]

    def after(self, start: int) -> "Piece":
        """The part of it from a position on."""
        if start <= self.start:
            return self
        held, rows = [], []
        for runs, each in zip(self.held, self.rows, strict=True):
            left = intersect_runs(runs, ((start, self.stop),))
            gone = each.size - count_runs(left)
            held.append(left)
            rows.append(each._replace(first=each.first + gone, size=each.size - gone))
        return Piece(start, self.stop, tuple(held), tuple(rows))


class Pieces(NamedTuple):
    """All that a write could store: a piece a node, from the first token on, and the state at the
    end.

    Only pieces that reach beyond `taken` have their rows.
    """

    layout: Layout
    taken: int
    pieces: tuple[Piece, ...]
    state: tuple[Rows, ...]
    has_checkpoint: bool

    @property
    def copied_bytes(self) -> int:
        """Bytes of copies that exist for the write alone: none where the host reads the extents."""
        if is_host_memory():
            return 0
        return sum(rows.raw.nbytes for piece in self.pieces for rows in piece.rows)


def is_host_memory() -> bool:
    """Whether the host can read MLX's arrays where they are."""
    return mx.default_device() == mx.Device(mx.cpu) or mx.metal.is_available()


def raw_type(itemsize: int) -> mx.Dtype:
    """The unsigned type of so many bytes, which numpy knows too."""
    return _RAW[itemsize]


def layout_of_write(write: ColdWrite) -> Layout:
    """The layout of what is to be stored."""
    ranges = write.lease.ranges
    return ranges[0].extent.layout if ranges else layout_of(write.lease.caches)


def pieces_of(write: ColdWrite, start: int) -> Pieces:
    """What a write holds, evaluated; what lies before `start` only where it costs nothing."""
    lease = write.lease
    ranges: Sequence[ExtentRange] = lease.ranges
    layout = layout_of_write(write)
    if not ranges:
        ranges = [seal(lease.caches, layout, 0, len(write.tokens)).whole()]
    checkpoint = snapshot(lease.caches, layout)
    taken = 0 if is_host_memory() else start
    pieces = [_piece(part, part.stop > taken) for part in ranges]
    state = tuple(
        Rows(_as_raw(buffer), 0, len(buffer), True)
        for buffer in (checkpoint.buffers if checkpoint is not None else ())
    )
    mx.eval([rows.raw for piece in pieces for rows in piece.rows], [rows.raw for rows in state])
    return Pieces(layout, taken, tuple(pieces), state, checkpoint is not None)


def _piece(part: ExtentRange, with_rows: bool) -> Piece:
    extent = part.extent
    runs = tuple(part.runs(index) for index in range(len(extent.buffers)))
    rows = []
    for buffer, whole, held in zip(extent.buffers, extent.runs, runs, strict=True):
        if with_rows:
            first = count_runs(intersect_runs(whole, ((0, part.start),)))
            rows.append(_rows(buffer, first, count_runs(held)))
    return Piece(part.start, part.stop, runs, tuple(rows))


def _rows(buffer: mx.array, first: int, count: int) -> Rows:
    if is_host_memory():
        return Rows(_as_raw(buffer), first, count, False)
    part = buffer[:, :, first : first + count].transpose(2, 0, 1, 3)
    return Rows(mx.contiguous(_as_raw(part)), 0, count, True)


def _as_raw(array: mx.array) -> mx.array:
    return array.view(raw_type(array.dtype.size))
