"""Rows that compute together: one read of what they share, a tail for each, steps in a pipeline.

A step is dispatched from the tokens of the step before while those are still being computed; they
are read afterwards. A row that turns out to be at its end has then been forwarded once more than
was needed, with its last token, which is part of its sequence all the same.

Prompts are computed in the same way: every token is a row of a step of its own, over the spans that
its prompt shares with others and over the part of its tail before it. Such a step holds the tokens
of many prompts, whatever their lengths, and chooses none.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache
from msgspec import Struct

from ..cache import kinds
from ..cache.layout import Layout, TokenLeaf
from ..request import TokenLogprob
from .ahead import TILE_TOGETHER, Ahead
from .batch_caches import Asked, BatchCache, StepState
from .grammar import choose_by_grammar
from .kernels.launch import MAX_SPANS
from .logprobs import StepLogprobs, step_logprobs
from .placement import Afford, Placement
from .prompt_logprobs import gather
from .sampling import sample
from .seat import Seat, SeatRow, States, zero_states
from .sharing import Piece, Sharing
from .slabs import SlabStatistics


class DecodeStatistics(Struct, frozen=True, kw_only=True):
    """The batch as it is: its rows, how many spans they share and of how many tokens, its tails."""

    rows: int = 0
    spans: int = 0
    span_tokens: int = 0
    tails: SlabStatistics = SlabStatistics()


class PrefillLimits(NamedTuple):
    """What is computed in one prefill step: rests of at most so many `tokens`; `keys` bounds the
    sum of all new tokens times the shared tokens that they attend to.
    """

    tokens: int = 0
    keys: int = 1 << 62

    def take(self, tokens: int, keys: int) -> bool:
        """Whether a rest of `tokens`, with so many keys to attend to, is within the limits."""
        return tokens <= self.tokens and keys <= self.keys


class _Flight(NamedTuple):
    """A dispatched step: the tokens chosen `[rows]`, the states after it, what rows ask to know.

    `logits` are kept while rows with a grammar have not chosen.
    """

    seats: list[Seat]
    tokens: mx.array
    states: States
    logprobs: StepLogprobs
    logits: mx.array | None


class DecodeBatch:
    """Decodes seats of one layout. If a method raises, the batch is lost."""

    def __init__(
        self,
        model: Any,
        layout: Layout,
        limits: PrefillLimits | None = None,
        max_spans: int = MAX_SPANS,
        ahead: Ahead | None = None,
        afford: Afford = lambda seat, reach: True,
    ) -> None:
        self._model = model
        self._layout = layout
        self._limits = limits or PrefillLimits()
        self._ahead = ahead or Ahead()
        self._placement = Placement(layout, max_spans, afford)
        self._slabs = self._placement.slabs
        self._parked: dict[Seat, None] = {}
        self._joining: list[Seat] = []
        self._flight: _Flight | None = None
        self._read: _Flight | None = None
        self._seats: list[Seat] = []
        self._state: StepState | None = None
        self._sharing = Sharing([], [])

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Tokens and readers of the spans of the last step."""
        spans = self._sharing.spans
        return tuple((span.piece.stop - span.piece.start, len(span.rows)) for span in spans)

    def prefill(self, parts: Sequence[tuple[Seat, int]]) -> None:
        """Start computing so many more tokens of each seat's prompt.

        If the model raises, what was not started has not changed, but that seats have tails.
        """
        # Who asks for log-probabilities has logits computed, which nobody else is to pay for.
        asked = {seat: seat.prompt_logprobs for seat, _ in parts if seat.prompt_logprobs}
        self._prefill_tiles([each for each in parts if each[0] not in asked], TILE_TOGETHER)
        size = min([TILE_TOGETHER, *(each.tile for each in asked.values())])
        self._prefill_tiles([each for each in parts if each[0] in asked], size)

    def add(self, seat: Seat) -> None:
        """Let a seat, whose prompt is computed, decode from the next step on that is dispatched."""
        assert not len(seat.ahead)
        seat.decodes = True
        self._parked.pop(seat, None)
        self._joining.append(seat)

    def rebase(self, seat: Seat, path: Sequence[Piece]) -> None:
        """Let a seat read more of its tokens where they are stored, and free its copy of them."""
        reach = path[-1].stop
        self._slabs.give_up(seat.tail, reach - seat.reach)
        seat.path, seat.reach = tuple(path), reach
        self._state = None

    def step(self) -> list[tuple[Seat, int, TokenLogprob | None]]:
        """One token for each seat (none for those added just now), with its log-probability where
        that is asked for; the next step is on its way.
        """
        if self._flight is None:
            self._flight = _complete(self._dispatch())
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
                if seat.grammar is not None:
                    seat.grammar.read(token)
                received.append((seat, token, logprob))
        self._flight = _complete(self._flight)
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
        self._parked.pop(seat, None)
        if seat in self._joining:
            self._joining.remove(seat)
        if seat.tail.capacity:
            self._slabs.free(seat.tail)
        if all(each.left for each in [*self._seats, *self._joining]):
            self._flight = self._read = self._state = None
            self._seats, self._sharing = [], Sharing([], [])
            self._placement.forget()

    def statistics(self) -> DecodeStatistics:
        """What is going on now."""
        lengths = [span.piece.stop - span.piece.start for span in self._sharing.spans]
        rows = [seat for seat in [*self._seats, *self._joining, *self._parked] if not seat.left]
        return DecodeStatistics(
            rows=len(rows),
            spans=len(lengths),
            span_tokens=sum(lengths),
            tails=self._slabs.statistics(),
        )

    def check_integrity(self) -> None:
        """Assert that seats and tails agree."""
        self._slabs.check_integrity()
        seats = {*self._seats, *self._joining, *self._parked}
        seated = [seat for seat in seats if seat.tail.capacity and not seat.left]
        assert self._slabs.statistics().tails == len(seated)
        for seat in seated:
            assert seat.reach + seat.tail.used == seat.length
            assert all(piece.extent.is_alive for piece in seat.path)
            assert not (seat.decodes and len(seat.ahead))

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

    def _served(
        self, parts: Sequence[tuple[Seat, int]]
    ) -> tuple[Sequence[tuple[Seat, int]], Sharing | None]:
        """The first of the parts, as many as the spans of one step can serve; these spans, if they
        had to be looked for.
        """
        while len(parts) > 1:
            keys = sum(count * seat.reach for seat, count in parts)
            if self._limits.take(0, keys):
                sharing = self._placement.serving([seat for seat, _ in parts])
                if sharing is not None:
                    return parts, sharing
            parts = parts[: len(parts) // 2]
        return parts, None

    def _prefill_tiles(self, parts: Sequence[tuple[Seat, int]], size: int) -> None:
        while parts:
            served, sharing = self._served(parts)
            for tile in _tiles(served, size):
                self._prefill(tile, sharing if len(tile) == len(served) else None)
            parts = parts[len(served) :]

    def _prefill(self, parts: Sequence[tuple[Seat, int]], sharing: Sharing | None) -> None:
        seats, counts = [seat for seat, _ in parts], [count for _, count in parts]
        self._parked.update(dict.fromkeys(seats))
        sharing, moved = self._placement.settle(seats, sharing)
        if moved:
            self._state = None
        state = self._placement.step_of(seats, counts, sharing)
        tokens = mx.array(np.concatenate([seat.ahead[:count] for seat, count in parts]))
        leaves = self._leaf_caches(state, zero_states(self._layout))
        before = self._slabs.snapshot()
        try:
            logits = self._model(tokens[:, None], cache=kinds.nest(self._layout, leaves))
            asked = [
                (seat.prompt_logprobs, seat.length, count)
                for seat, count in parts
                if seat.prompt_logprobs is not None
            ]
            gathered = gather(logits[:, -1, :], asked) if asked else []
        except BaseException:
            self._slabs.restore(before)
            raise
        del before, logits
        self._ahead.start([*gathered, *self._slabs.arrays], sum(counts))
        for seat, count in parts:
            seat.ahead = seat.ahead[count:]
            seat.length += count
            seat.tail.used += count

    def _dispatch(self) -> _Flight | None:
        """Start the step after the one in flight; None if no row needs one."""
        seats = self._take_seats()
        if not seats:
            return None
        logits, states = self._forward(seats, self._next_state(seats))
        later = any(seat.grammar is not None for seat in seats)
        tokens = sample(logits, [seat.sampler if seat.grammar is None else None for seat in seats])
        asking = [] if later else [seat.top_logprobs for seat in seats]
        logprobs = step_logprobs(logits, tokens, asking)
        for seat in seats:
            seat.sampled += 1
        held = [array for leaf in states for array in leaf if array is not None]
        kept = [logits] if later else []
        mx.async_eval(tokens, logprobs.arrays, self._slabs.arrays, held, kept)
        return _Flight(seats, tokens, states, logprobs, logits if later else None)

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
        leaves = self._leaf_caches(state, states)
        for seat in seats:
            seat.length += 1
        logits = self._model(tokens[:, None], cache=kinds.nest(self._layout, leaves))[:, -1, :]
        return logits, [
            list(leaf.cache) if isinstance(leaf, ArraysCache) else [] for leaf in leaves
        ]

    def _leaf_caches(self, state: StepState, states: States) -> list[Any]:
        return [
            self._leaf_cache(index, leaf, state, states[index])
            for index, leaf in enumerate(self._layout.leaves)
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
        if self._state is None or seats != known:
            self._sharing, _ = self._placement.settle(seats)
            self._state = None
        elif self._slabs.make_room(()):
            self._state = None
        if self._state is None:
            self._state = self._placement.step_of(seats, [1] * len(seats), self._sharing)
        else:
            self._state = self._state.advance()
        for seat in seats:
            seat.tail.used += 1
        return self._state


def _complete(flight: _Flight | None) -> _Flight | None:
    """Let the rows with a grammar choose: it has read all tokens before those of this step."""
    if flight is None or flight.logits is None:
        return flight
    tokens = choose_by_grammar(flight.logits, flight.tokens, flight.seats)
    logprobs = step_logprobs(flight.logits, tokens, [seat.top_logprobs for seat in flight.seats])
    mx.async_eval(tokens, logprobs.arrays)
    return flight._replace(tokens=tokens, logprobs=logprobs, logits=None)


def _tiles(parts: Sequence[tuple[Seat, int]], size: int) -> Iterator[list[tuple[Seat, int]]]:
    """The parts, cut into pieces of at most `size` tokens together."""
    tile: list[tuple[Seat, int]] = []
    left = size
    for seat, count in parts:
        while count:
            taken = min(count, left)
            tile.append((seat, taken))
            count, left = count - taken, left - taken
            if not left:
                yield tile
                tile, left = [], size
    if tile:
        yield tile


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
