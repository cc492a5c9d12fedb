"""A row's place in a decode batch, and the row as it stands, to be put."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..cache.extents import Extent, pack
from ..cache.kinds.arrays import Checkpoint, pack_states
from ..cache.layout import Layout, StateLeaf
from ..cache.prefix_hash import Tokens
from ..cache.runs import Runs, intersect_runs
from ..cache.segments import Segment, coverage, select
from .grammar import GrammarState
from .prompt_logprobs import PromptLogprobs
from .sharing import Piece
from .slabs import Tail, TailSlabs

States = list[list[mx.array | None]]
"""For every leaf its arrays: none for a token leaf."""


class Seat:
    """What a decode batch knows of a row.

    `path` are the pieces of extents that it reads where they lie, up to position `reach`; its tail
    holds [reach, length). `length` counts the tokens that were forwarded, those in flight included;
    `ahead` are those of the prompt that are to be computed before the row decodes, and `token` is
    the prompt's last one, the first that a decode step forwards. `segments` and `states`, by leaf,
    are where its KV is before it has a tail; without segments all of it is on the path. `sampled`
    counts the tokens chosen, of at most `max_tokens`; `outputs` are those that were read. `grammar`
    is what they keep to, if anything. `top_logprobs` is how many alternatives come with each
    token's log-probability, None for no log-probabilities; `prompt_logprobs` gets those of the
    prompt, if they are asked for.
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
        ahead: Sequence[int] | Tokens = (),
        grammar: GrammarState | None = None,
        top_logprobs: int | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None:
        self.path = tuple(path)
        self.segments = segments
        self.states = states
        self.length = length
        self.ahead = ahead
        self.token = token
        self.max_tokens = max_tokens
        self.sampler = sampler
        self.grammar = grammar
        self.top_logprobs = top_logprobs
        self.prompt_logprobs = prompt_logprobs
        self.reach = path[-1].stop if path else 0
        own = length - self.reach + len(ahead) + 1
        self.tail = Tail(own + max_tokens, reserve=own if len(ahead) else 0)
        self.first_held: dict[int, int] = {}
        self.sampled = 0
        self.outputs: list[int] = []
        self.decodes = False
        self.left = False

    def cut_path(self, reach: int) -> None:
        """Read pieces up to `reach` only; what lies behind is to be in the tail."""
        pieces = [piece for piece in self.path if piece.start < reach]
        self.path = tuple(piece._replace(stop=min(piece.stop, reach)) for piece in pieces)
        self.tail.limit += self.reach - reach
        if self.tail.reserve:
            self.tail.reserve += self.reach - reach
        self.reach = reach

    def held(self, leaf: int, slabs: TailSlabs) -> list[Segment]:
        """Everything that a leaf still holds of the row, ascending."""
        if self.segments:
            return list(self.segments[leaf])
        if not self.tail.used:
            return _on_path(leaf, self.path)
        first = max(0, self.first_held.get(leaf, 0) - self.reach)
        return [*_on_path(leaf, self.path), slabs.segment(leaf, self.tail, self.reach, first)]


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


def path_segments(layout: Layout, path: Sequence[Piece]) -> list[list[Segment]]:
    """What every leaf holds of a path, ascending; nothing for a state leaf."""
    return [
        [] if isinstance(leaf, StateLeaf) else _on_path(index, path)
        for index, leaf in enumerate(layout.leaves)
    ]


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


def _on_path(leaf: int, path: Sequence[Piece]) -> list[Segment]:
    return [s for extent, start, stop in path for s in extent.segments(leaf, start, stop)]
