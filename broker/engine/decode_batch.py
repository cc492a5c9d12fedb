"""Rows that decode together: one read of what they share, a tail for each, steps in a pipeline.

A step is dispatched from the tokens of the step before while those are still being computed; they
are read afterwards. A row that turns out to be at its end has then been forwarded once more than
was needed, with its last token, which is part of its sequence all the same.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache
from msgspec import Struct

from ..cache import kinds
from ..cache.extents import Extent
from ..cache.layout import Layout, StateLeaf, TokenLeaf
from ..cache.segments import select
from ..request import TokenLogprob
from .batch_caches import Asked, BatchCache, StepState
from .decode_plan import DecodePlan, Group
from .kernels.launch import MAX_SPANS
from .logprobs import StepLogprobs, step_logprobs
from .sampling import sample
from .seat import Seat, SeatRow, States
from .shared_attention import Span
from .sharing import Sharing, share
from .slabs import SlabStatistics, TailSlabs

PRIVATE_TOKENS = 512
"""A last piece shorter than this that nobody else reads is copied into the row's tail."""


class DecodeStatistics(Struct, frozen=True, kw_only=True):
    """The batch as it is: its rows, how many spans they share and of how many tokens, its tails."""

    rows: int = 0
    spans: int = 0
    span_tokens: int = 0
    tails: SlabStatistics = SlabStatistics()


class _Flight(NamedTuple):
    """A dispatched step: the tokens chosen `[rows]`, the states after it, what rows ask to know."""

    seats: list[Seat]
    tokens: mx.array
    states: States
    logprobs: StepLogprobs


class DecodeBatch:
    """Decodes seats of one layout. If a method raises, the batch is lost."""

    def __init__(self, model: Any, layout: Layout, max_spans: int = MAX_SPANS) -> None:
        self._model = model
        self._layout = layout
        self._max_spans = max_spans
        self._slabs = TailSlabs(layout)
        self._joining: list[Seat] = []
        self._flight: _Flight | None = None
        self._read: _Flight | None = None
        self._seats: list[Seat] = []
        self._state: StepState | None = None
        self._sharing = Sharing([], [])
        self._spans: dict[tuple[Extent, int, int, int], Span] = {}

    def add(self, seat: Seat) -> None:
        """Let a seat take part from the next step on that is dispatched."""
        self._joining.append(seat)

    def step(self) -> list[tuple[Seat, int, TokenLogprob | None]]:
        """One token for each seat (none for those added just now), with its log-probability where
        that is asked for; the next step is on its way.
        """
        if self._flight is None:
            self._flight = self._dispatch()
        current = self._read = self._flight
        if current is None:
            return []
        self._flight = self._dispatch()
        received: list[tuple[Seat, int, TokenLogprob | None]] = []
        tokens: Any = current.tokens.tolist()
        logprobs = current.logprobs.read(tokens)
        for seat, token, logprob in zip(current.seats, tokens, logprobs, strict=True):
            if not seat.left:
                seat.outputs.append(token)
                received.append((seat, token, logprob))
        return received

    def row(self, seat: Seat) -> SeatRow:
        """The seat as it stands, to be put: with state, as it was before its last token if that is
        still known; otherwise with all that was forwarded.
        """
        length, states = seat.length, seat.states
        if self._read is not None and seat in self._read.seats and self._layout.has_state:
            states = _pick(self._read.states, [self._read.seats.index(seat)])
            length -= self._flight is not None and seat in self._flight.seats
        elif self._flight is not None and seat in self._flight.seats:
            states = _pick(self._flight.states, [self._flight.seats.index(seat)])
        return SeatRow(self._layout, seat, self._slabs, states, length)

    def remove(self, seat: Seat) -> None:
        """Take a seat out, wherever it is. Doing so again is harmless."""
        if seat.left:
            return
        seat.left = True
        if seat in self._joining:
            self._joining.remove(seat)
        if seat.tail.capacity:
            self._slabs.free(seat.tail)
        if all(each.left for each in [*self._seats, *self._joining]):
            self._flight = self._read = self._state = None
            self._seats, self._spans, self._sharing = [], {}, Sharing([], [])

    def statistics(self) -> DecodeStatistics:
        """What is going on now."""
        lengths = [span.piece.stop - span.piece.start for span in self._sharing.spans]
        rows = [seat for seat in [*self._seats, *self._joining] if not seat.left]
        return DecodeStatistics(
            rows=len(rows),
            spans=len(lengths),
            span_tokens=sum(lengths),
            tails=self._slabs.statistics(),
        )

    def check_integrity(self) -> None:
        """Assert that seats and tails agree."""
        self._slabs.check_integrity()
        seated = [seat for seat in self._seats if not seat.left]
        assert self._slabs.statistics().tails == len(seated)
        for seat in seated:
            assert seat.reach + seat.tail.used == seat.length

    def probe(self) -> tuple[mx.array, set[Asked]]:
        """One step of the seats that were added: the logits `[rows, vocabulary]`, and what its
        layers asked of attention.
        """
        seats = self._take_seats()
        state = self._next_state(seats)
        asked: set[Asked] = set()
        state.asked = asked
        logits, _ = self._forward(seats, state)
        return logits, asked

    def _dispatch(self) -> _Flight | None:
        """Start the step after the one in flight; None if no row needs one."""
        seats = self._take_seats()
        if not seats:
            return None
        logits, states = self._forward(seats, self._next_state(seats))
        tokens = sample(logits, [seat.sampler for seat in seats])
        logprobs = step_logprobs(logits, tokens, [seat.top_logprobs for seat in seats])
        for seat in seats:
            seat.sampled += 1
        held = [array for leaf in states for array in leaf if array is not None]
        mx.async_eval(tokens, logprobs.arrays, self._slabs.arrays, held)
        return _Flight(seats, tokens, states, logprobs)

    def _take_seats(self) -> list[Seat]:
        """The rows of the next step, each with room in its tail."""
        going = self._flight.seats if self._flight is not None else []
        # Its last token too is forwarded, so that the next turn finds all that was generated.
        seats = [s for s in going if not s.left and s.sampled <= s.max_tokens]
        joined, self._joining = self._joining, []
        seats += joined
        taking_part = set(seats)
        ended = [s for s in self._seats if not s.left and s not in taking_part]
        self._seats = ended + seats
        return seats

    def _forward(self, seats: list[Seat], state: StepState) -> tuple[mx.array, States]:
        tokens, states = self._inputs(seats)
        leaves = [
            self._leaf_cache(index, leaf, state, states[index])
            for index, leaf in enumerate(self._layout.leaves)
        ]
        for seat in seats:
            seat.length += 1
        caches = kinds.nest(self._layout, leaves)
        logits = self._model(tokens[:, None], cache=caches)[:, -1, :]
        return logits, [
            list(leaf.cache) if isinstance(leaf, ArraysCache) else [] for leaf in leaves
        ]

    def _leaf_cache(self, index: int, leaf: Any, state: StepState, states: Sequence[Any]) -> Any:
        if isinstance(leaf, TokenLeaf):
            return BatchCache(leaf, index, self._slabs, state)
        cache = ArraysCache(len(leaf.slots))
        for slot, array in enumerate(states):
            cache[slot] = array
        return cache

    def _inputs(self, seats: list[Seat]) -> tuple[mx.array, States]:
        """Tokens `[rows]` and states of the step, from the flight before and from who joins."""
        flight = self._flight
        if flight is not None and flight.seats == seats:
            return flight.tokens, flight.states
        going = [] if flight is None else [s for s in seats if s.sampled]
        new = [seat for seat in seats if not seat.sampled]
        parts = [mx.array([seat.token for seat in new], mx.uint32)] if new else []
        states = [seat.states for seat in new]
        if going:
            assert flight is not None
            rows = [flight.seats.index(seat) for seat in going]
            parts.insert(0, flight.tokens[mx.array(rows)])
            states.insert(0, _pick(flight.states, rows))
        return mx.concatenate(parts), _stack(states)

    def _next_state(self, seats: list[Seat]) -> StepState:
        """Where everything lies in this step; anew only where rows or tails have moved."""
        known = self._flight.seats if self._flight is not None else []
        changed = self._state is None or seats != known
        if changed:
            self._sharing = share([seat.path for seat in seats], self._max_spans)
        moved = self._place(seats) if changed else self._slabs.make_room(())
        if self._state is None or changed or moved:
            self._state = self._new_state(seats)
        else:
            self._state = self._state.advance()
        for seat in seats:
            seat.tail.used += 1
        return self._state

    def _place(self, seats: list[Seat]) -> bool:
        """Give tails what no span serves any more, and new rows a tail; whether tails moved."""
        added = []
        for seat, reach in zip(seats, self._sharing.reach, strict=True):
            ahead = seat.reach - reach if seat.sampled else seat.length - reach
            if ahead or not seat.sampled:
                source = seat.segments if not seat.sampled else self._path_segments(seat)
                seat.cut_path(reach)
                added.append((seat, ahead, source))
        moved = self._slabs.make_room([(seat.tail, ahead) for seat, ahead, _ in added])
        for seat, ahead, source in added:
            self._fill(seat, ahead, source)
        return moved

    def _path_segments(self, seat: Seat) -> list[Any]:
        return [
            [s for extent, a, b in seat.path for s in extent.segments(index, a, b)]
            if isinstance(leaf, TokenLeaf)
            else []
            for index, leaf in enumerate(self._layout.leaves)
        ]

    def _fill(self, seat: Seat, count: int, source: Sequence[Sequence[Any]]) -> None:
        """Copy positions [reach, reach + count) into the front of a tail, as far as they exist."""
        start, stop = seat.reach, seat.reach + count
        for index, leaf in enumerate(self._layout.leaves):
            if not isinstance(leaf, TokenLeaf) or not count:
                continue
            parts = select(source[index], ((start, stop),))
            for part in parts:
                self._slabs.fill(seat.tail, index, part.start - start, part.planes)
            # Only window layers lack tokens: those that no later token sees.
            at = stop
            for part in reversed(parts):
                at = part.start if part.stop == at else at
            if at > start:
                seat.first_held[index] = max(at, seat.first_held.get(index, 0))
        seat.segments = ()

    def _new_state(self, seats: list[Seat]) -> StepState:
        lengths = [seat.tail.used + 1 for seat in seats]
        slots = [seat.tail.begin for seat in seats]
        positions = [seat.reach for seat in seats]
        plans: dict[int, DecodePlan] = {}
        spans: dict[int, list[Span]] = {}
        kept, self._spans = self._spans, {}
        for index, leaf in enumerate(self._layout.leaves):
            if isinstance(leaf, StateLeaf):
                continue
            window = leaf.retention.window
            groups, spans[index] = self._groups(index, window, seats, kept)
            if window not in plans:
                plans[window] = DecodePlan(
                    groups, lengths, slots=slots, window=window, positions=positions
                )
        offset = mx.array([seat.length for seat in seats], mx.int32)
        place = mx.array([tail.begin + tail.used for tail in (s.tail for s in seats)], mx.int32)
        return StepState(offset, place, plans, spans)

    def _groups(
        self, index: int, window: int, seats: list[Seat], kept: dict[Any, Span]
    ) -> tuple[list[Group], list[Span]]:
        """The groups of one layer, and its KV of them: what some row of a group can see."""
        groups, spans = [], []
        for (extent, start, stop), rows in self._sharing.spans:
            oldest = min(seats[row].length for row in rows) + 1 - window if window else 0
            for segment in extent.segments(index, max(start, min(oldest, stop)), stop):
                groups.append(Group(rows, len(segment), segment.start))
                key = (extent, index, segment.start, segment.stop)
                if key not in kept:
                    # An index would copy, even into an axis of one.
                    kept[key] = Span(*(mx.squeeze(plane, 0) for plane in segment.planes))
                self._spans[key] = kept[key]
                spans.append(kept[key])
        return groups, spans


def private_piece(seat: Seat, others: Sequence[Seat]) -> bool:
    """Whether the last piece that a seat reads is better copied into its tail."""
    if not seat.path:
        return False
    last = seat.path[-1]
    if last.stop - last.start >= PRIVATE_TOKENS:
        return False
    return not any(piece.extent is last.extent for other in others for piece in other.path)


def _pick(states: States, rows: list[int]) -> States:
    chosen = mx.array(rows)
    return [[None if a is None else a[chosen] for a in arrays] for arrays in states]


def _stack(states: list[States]) -> States:
    if len(states) == 1:
        return states[0]
    return [
        [None if a[0] is None else mx.concatenate(list(a)) for a in zip(*arrays, strict=True)]
        for arrays in zip(*states, strict=True)
    ]
