"""A row's place in a decode batch, and the row as it stands, to be put."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..cache.extents import Extent, pack
from ..cache.kinds.arrays import Checkpoint, pack_states
from ..cache.layout import Layout, StateLeaf
from ..cache.runs import Runs, intersect_runs
from ..cache.segments import Segment, coverage, select
from .sharing import Piece
from .slabs import Tail, TailSlabs

States = list[list[mx.array | None]]
"""For every leaf its arrays: none for a token leaf."""


class Seat:
    """What a decode batch knows of a row.

    `path` are the pieces of extents that it reads where they lie, up to position `reach`; its tail
    holds [reach, length). `length` counts the tokens that were forwarded, those in flight
    included; `token` is the first one to forward. `segments` and `states`, by leaf, are where its
    KV is before it has a tail. `sampled` counts the tokens chosen, of at most `max_tokens`;
    `outputs` are those that were read. `top_logprobs` is how many alternatives come with each
    token's log-probability, None for no log-probabilities.
    """

    def __init__(
        self,
        path: Sequence[Piece],
        segments: Sequence[Sequence[Segment]],
        states: States,
        *,
        length: int,
        token: int,
        max_tokens: int,
        sampler: Any,
        top_logprobs: int | None = None,
    ) -> None:
        self.path = tuple(path)
        self.segments = segments
        self.states = states
        self.length = length
        self.token = token
        self.max_tokens = max_tokens
        self.sampler = sampler
        self.top_logprobs = top_logprobs
        self.reach = path[-1].stop if path else 0
        self.tail = Tail(length - self.reach + max_tokens + 1)
        self.first_held: dict[int, int] = {}
        self.sampled = 0
        self.outputs: list[int] = []
        self.left = False

    def cut_path(self, reach: int) -> None:
        """Read pieces up to `reach` only."""
        pieces = [piece for piece in self.path if piece.start < reach]
        self.path = tuple(piece._replace(stop=min(piece.stop, reach)) for piece in pieces)
        self.tail.limit += self.reach - reach
        self.reach = reach

    def held(self, leaf: int, slabs: TailSlabs) -> list[Segment]:
        """Everything that a leaf still holds of the row, ascending."""
        if not self.tail.used:
            return list(self.segments[leaf])
        found = [
            segment
            for extent, start, stop in self.path
            for segment in extent.segments(leaf, start, stop)
        ]
        first = max(0, self.first_held.get(leaf, 0) - self.reach)
        return [*found, slabs.segment(leaf, self.tail, self.reach, first)]


class SeatRow:
    """A seat as `PromptCache.put` takes it: the prefix stays where it is.

    `states` are the arrays of the state leaves at `length`, one row each.
    """

    def __init__(
        self, layout: Layout, seat: Seat, slabs: TailSlabs, states: States, length: int
    ) -> None:
        self.layout = layout
        self.length = length
        self._seat = seat
        self._slabs = slabs
        self._states = states

    def held(self) -> tuple[Runs, ...]:
        """The positions that it holds for each of `layout.groups`."""
        return tuple(coverage(self._segments(group.members[0][0])) for group in self.layout.groups)

    def cut(self, start: int, stop: int) -> Extent:
        """Copy tokens [start, stop) into a new extent."""
        runs = tuple(intersect_runs(((start, stop),), held) for held in self.held())
        return pack(self.layout, start, stop, runs, self._segments)

    def checkpoint(self) -> Checkpoint | None:
        """Owned copies of its state; None for a layout without state."""
        return pack_states(self.layout, self._states) if self.layout.has_state else None

    def _segments(self, leaf: int) -> Sequence[Segment]:
        return select(self._seat.held(leaf, self._slabs), ((0, self.length),))


def zero_states(layout: Layout) -> States:
    """The states of a row that has seen nothing."""
    return [
        [
            None if slot is None else mx.zeros(slot.shape, getattr(mx, slot.dtype))
            for slot in leaf.slots
        ]
        if isinstance(leaf, StateLeaf)
        else []
        for leaf in layout.leaves
    ]
