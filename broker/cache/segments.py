"""Runs of tokens of one layer, wherever their arrays live: in an extent, in a clone's tail, in a
stock cache.

A segment is a position range over buffers that nobody writes to; its arrays are cut out on first
use.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import mlx.core as mx

from .runs import Runs, clean_runs


class Source(NamedTuple):
    """Where one plane of a segment lies: row `row` of `buffer` `[rows, heads, tokens, dim]`, from
    token `first` on.
    """

    buffer: mx.array
    row: int
    first: int


class Segment:
    """Tokens [start, stop) (absolute positions) of one layer."""

    __slots__ = ("_planes", "sources", "start", "stop")

    def __init__(self, start: int, stop: int, sources: tuple[Source, ...]) -> None:
        self.start = start
        self.stop = stop
        self.sources = sources
        self._planes: tuple[mx.array, ...] | None = None

    @classmethod
    def over(cls, start: int, stop: int, buffers: Iterable[mx.array], first: int = 0) -> "Segment":
        """A segment over plain arrays `[1, heads, tokens, dim]`, from their token `first` on."""
        return cls(start, stop, tuple(Source(buffer, 0, first) for buffer in buffers))

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def planes(self) -> tuple[mx.array, ...]:
        """The arrays, `[1, heads, len(self), dim]` each: views of the buffers, not copies."""
        if self._planes is None:
            count = len(self)
            self._planes = tuple(
                source.buffer[source.row : source.row + 1, :, source.first : source.first + count]
                for source in self.sources
            )
        return self._planes

    def narrow(self, start: int, stop: int) -> "Segment":
        """The part of it within [start, stop), which must overlap it."""
        start, stop = max(start, self.start), min(stop, self.stop)
        if (start, stop) == (self.start, self.stop):
            return self
        skip = start - self.start
        sources = tuple(source._replace(first=source.first + skip) for source in self.sources)
        return Segment(start, stop, sources)

    def continues(self, other: "Segment") -> bool:
        """Whether `other` is followed by this one in positions and in the same buffers."""
        return self.start == other.stop and all(
            mine.buffer is theirs.buffer
            and mine.row == theirs.row
            and mine.first == theirs.first + len(other)
            for mine, theirs in zip(self.sources, other.sources, strict=True)
        )


class KVHandle:
    """What our caches return as keys and values: the segments to attend to, oldest first, never
    empty.

    Opaque to models. The engine's attention recognises it; anything else that touches it fails
    loudly.
    """

    __slots__ = ("bits", "group_size", "segments")

    def __init__(self, segments: tuple[Segment, ...], group_size: int = 0, bits: int = 0) -> None:
        self.segments = segments
        self.group_size = group_size
        self.bits = bits

    @property
    def length(self) -> int:
        """How many tokens the segments hold."""
        return sum(map(len, self.segments))

    def join(self) -> tuple[mx.array, ...]:
        """All segments as one array a plane (copied, unless there is only one segment)."""
        return join_planes([segment.planes for segment in self.segments])


def join_planes(parts: Sequence[tuple[mx.array, ...]]) -> tuple[mx.array, ...]:
    """Concatenate the planes of several segments along tokens; one segment is passed through."""
    if len(parts) == 1:
        return parts[0]
    return tuple(mx.concatenate(list(plane), axis=2) for plane in zip(*parts, strict=True))


def owned(parts: Sequence[mx.array], axis: int) -> mx.array:
    """Concatenate along `axis` into a buffer of exactly that size, also for a single part."""
    if len(parts) == 1:
        # A second, empty input: joining one array could hand back a view of a larger buffer.
        empty = mx.zeros([0 if at == axis else size for at, size in enumerate(parts[0].shape)])
        parts = [parts[0], empty.astype(parts[0].dtype)]
    return mx.concatenate(list(parts), axis=axis)


def select(segments: Iterable[Segment], runs: Runs) -> tuple[Segment, ...]:
    """The parts of segments (ascending, disjoint) within `runs`, those in one buffer joined."""
    result: list[Segment] = []
    for start, stop in runs:
        for segment in segments:
            if segment.start < stop and start < segment.stop:
                part = segment.narrow(start, stop)
                if result and part.continues(result[-1]):
                    last = result.pop()
                    part = Segment(last.start, part.stop, last.sources)
                result.append(part)
    return tuple(result)


def covers(segments: Iterable[Segment], runs: Runs) -> bool:
    """Whether segments (ascending, disjoint) hold all positions of `runs`."""
    for start, stop in runs:
        for segment in segments:
            if segment.start <= start < segment.stop:
                start = segment.stop
        if start < stop:
            return False
    return True


def coverage(segments: Iterable[Segment]) -> Runs:
    """The positions that segments hold."""
    return clean_runs((segment.start, segment.stop) for segment in segments)
