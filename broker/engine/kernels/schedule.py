"""Which thread block attends to what: the tables of one decode step. Imports no MLX.

Every span, and the long part of every long tail, is cut into chunks of whole key tiles so that all
blocks of a launch fit the GPU at once. A block writes one partial result for each of its rows; the
partials of a row lie side by side, whichever spans and chunks they come from, and are merged last.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.int32]

LONG_TAIL = 1024
"""Tail tokens from which a tail is worth cutting into chunks."""

MIN_CHUNK = 256
"""Keys below which a chunk costs more to merge than it gains."""

RUN_BLOCK = 128
"""Tokens of one prompt that attend together to what lies before them in their tail."""

LEAST_BEFORE = 64
"""Tail tokens before such a block from which that is worth a segment."""

TAIL_SEGMENT = 0


class Segment(NamedTuple):
    """Keys that some rows attend to together: a shared span, or the part of a tail that all of a
    block of its tokens see.

    `source` is 0 for the slab of the tails and 1 + the span's index otherwise, `slot` the place in
    the slab, `begin` and `end` the keys in it, `position` the absolute position of its key 0.
    """

    source: int
    slot: int
    rows: Sequence[int]
    begin: int
    end: int
    position: int = 0


class Tiling(NamedTuple):
    """What a kernel variant handles in one block, and how many of its blocks the GPU holds at once.

    `rows` are query rows with the heads that share a KV head folded in, `keys` the keys of a tile,
    `blocks` the blocks for each KV head, `ratio` the query heads for each KV head.
    """

    rows: int
    keys: int
    blocks: int
    ratio: int


class Tables(NamedTuple):
    """`work` [blocks, 8] and `members` [rows of all segments, 3] are the structs of common.cuh;
    `partial_begins` [rows + 1] says where each row's partials begin."""

    work: Table
    members: Table
    partial_begins: Table

    @property
    def partials(self) -> int:
        """Partial results of all rows."""
        return int(self.partial_begins[-1])


def runs_of(lengths: Sequence[int], slots: Sequence[int]) -> list[tuple[int, int]]:
    """The rows [first, last) that are consecutive tokens of one tail, all rows in order."""
    length, slot = np.asarray(lengths), np.asarray(slots)
    follows = (slot[1:] == slot[:-1]) & (length[1:] == length[:-1] + 1)
    breaks = (np.flatnonzero(~follows) + 1).tolist()
    return list(pairwise([0, *breaks, len(length)]))


def split_tails(
    lengths: Sequence[int],
    begins: Sequence[int],
    slots: Sequence[int],
    positions: Sequence[int],
    window: int = 0,
) -> tuple[list[Segment], list[int]]:
    """Segments for the long part of long tails, and for what tokens of one prompt see together;
    and where each row's remaining tail begins.
    """
    segments: list[Segment] = []
    remaining = list(begins)
    for first, last in _blocks_of_runs(lengths, slots):
        begin, length = begins[first], lengths[first]
        if window:
            begin = max(begin, length - window)
        cut = begin
        if last - first > 1 and length - 1 - begin >= LEAST_BEFORE:
            cut = length - 1
        elif last - first == 1 and length - begin >= LONG_TAIL:
            cut = begin + (length - begin) // MIN_CHUNK * MIN_CHUNK
        if cut > begin:
            rows = range(first, last)
            segments.append(Segment(TAIL_SEGMENT, slots[first], rows, begin, cut, positions[first]))
            remaining[first:last] = [cut] * len(rows)
    return segments, remaining


def _blocks_of_runs(lengths: Sequence[int], slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    for first, last in runs_of(lengths, slots):
        for start in range(first, last, RUN_BLOCK):
            yield start, min(start + RUN_BLOCK, last)


def build_tables(
    segments: Sequence[Segment],
    rows: int,
    tiling: Tiling,
    *,
    window: int = 0,
    positions: Sequence[int] = (),
) -> Tables:
    """The tables of one step of `rows` rows; `positions` (windows only) as in `DecodePlan`."""
    chunks = _chunks(segments, tiling)
    counts = np.zeros(rows + 1, np.int64)
    for segment, count in zip(segments, chunks, strict=True):
        counts[np.asarray(segment.rows, np.int64) + 1] += count
    partial_begins = np.cumsum(counts)
    following = partial_begins[:-1].copy()
    members: list[npt.NDArray[np.int64]] = []
    work: list[tuple[int, ...]] = []
    first_member = 0
    for segment, count in zip(segments, chunks, strict=True):
        indices = np.asarray(segment.rows, np.int64)
        origins = np.zeros_like(indices)
        if window:
            origins = window + segment.position - np.asarray(positions, np.int64)[indices]
        members.append(np.stack([indices, following[indices], origins], axis=1))
        following[indices] += count
        work += _blocks(segment, first_member, count, tiling)
        first_member += len(indices)
    return Tables(
        np.array(work, np.int32).reshape(-1, 8),
        np.concatenate(members).astype(np.int32) if members else np.zeros((0, 3), np.int32),
        partial_begins.astype(np.int32),
    )


def _chunks(segments: Sequence[Segment], tiling: Tiling) -> list[int]:
    """How many chunks each segment is cut into: one wave of blocks, all of about one length."""
    row_tiles = [-(-len(s.rows) * tiling.ratio // tiling.rows) for s in segments]
    key_tiles = [-(-(s.end - s.begin) // tiling.keys) for s in segments]
    if not segments:
        return []
    shortest, longest = max(1, MIN_CHUNK // tiling.keys), max(key_tiles)
    waves = max(1, -(-sum(row_tiles) // tiling.blocks))
    while shortest < longest:
        middle = (shortest + longest) // 2
        blocks = sum(r * -(-k // middle) for r, k in zip(row_tiles, key_tiles, strict=True))
        if blocks <= waves * tiling.blocks:
            longest = middle
        else:
            shortest = middle + 1
    return [-(-k // shortest) for k in key_tiles]


def _blocks(
    segment: Segment, first_member: int, chunks: int, tiling: Tiling
) -> list[tuple[int, ...]]:
    """The blocks of one segment; those that read the same keys are neighbours."""
    folded = len(segment.rows) * tiling.ratio
    tiles = -(-(segment.end - segment.begin) // tiling.keys)
    cuts = [segment.begin + tiles * c // chunks * tiling.keys for c in range(chunks)]
    cuts.append(segment.end)
    return [
        (
            segment.source,
            segment.slot,
            first_member,
            first,
            min(first + tiling.rows, folded),
            cuts[chunk],
            cuts[chunk + 1],
            chunk,
        )
        for chunk in range(chunks)
        for first in range(0, folded, tiling.rows)
    ]
