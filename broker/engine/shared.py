"""Computing with shared prefixes: rows keep their lease, and only their tails are their own."""

from collections.abc import Callable, Sequence

import numpy as np

from ..cache import kinds
from ..cache.lease import PromptLease
from ..cache.prefix_hash import Tokens
from ..cache.prompt_cache import PromptCache
from ..cache.segments import Segment
from ..models import LoadedModel
from ..request import FinishReason
from .ahead import Ahead
from .batch_test import BatchVerdict
from .decode_batch import DecodeBatch, DecodeStatistics
from .row import Row, RowToken
from .seat import Seat, SeatRow, path_segments, zero_states
from .sharing import Piece, is_worth_a_span


class SharedDecoder:
    """Computes rows in a `DecodeBatch`. After a `step` that raised, `reset` starts anew.

    Short rests of prompts are computed there too, those of many rows at once. `afford` asks for
    the memory of a row that reads only so many tokens where the cache holds them.
    """

    def __init__(
        self,
        model: LoadedModel,
        cache: PromptCache,
        verdict: BatchVerdict,
        ahead: Ahead,
        afford: Callable[[Row, int], bool],
    ) -> None:
        assert verdict.layout is not None
        self._afford = afford
        self._ahead = ahead
        self._model = model
        self._cache = cache
        self._layout = verdict.layout
        self._limits = verdict.prefill
        self._stops = frozenset(model.tokenizer.eos_token_ids)
        self._seats: dict[Row, Seat] = {}
        self._rows: dict[Seat, Row] = {}
        self._ended: set[Row] = set()
        self._copied: set[Seat] = set()
        self._batch = self._new_batch()

    @property
    def donates(self) -> bool:
        """Whether a running row can be stored at any length it has reached."""
        return not self._layout.has_state

    @property
    def running(self) -> list[Row]:
        """The rows that decode."""
        return [row for row, seat in self._seats.items() if seat.decodes and row not in self._ended]

    @property
    def rows(self) -> list[Row]:
        """All rows that were taken in."""
        return list(self._seats)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Tokens and readers of the spans of the last step."""
        return self._batch.spans

    def can_seat(self, row: Row) -> bool:
        """Whether the rest of a row's prompt is to be computed here: it is short, and what was
        computed elsewhere is stored.
        """
        rest = len(row.sequence) - 1 - row.position
        if self._layout.has_state or not self._limits.take(rest, rest * row.position):
            return False
        return not row.caches or row.stored == row.position

    def seat(self, row: Row) -> None:
        """Take a row in. Its lease is exchanged for one on all that is stored of it."""
        if row.caches:
            self._renew(row)
        seat = self._seat(row)
        if self._is_private(row, seat):
            if not seat.segments:
                seat.segments = path_segments(self._layout, seat.path)
            seat.cut_path(seat.path[-1].start)
            self._shorten(row, seat)
        row.caches = []
        self._seats[row], self._rows[seat] = seat, row

    def prefill(self, parts: Sequence[tuple[Row, int]]) -> None:
        """Start computing the prompts of rows taken in, each up to a position."""
        self._batch.prefill([(self._seats[row], stop - row.position) for row, stop in parts])
        for row, stop in parts:
            row.position = stop
        self._unpin()

    def join(self, row: Row) -> None:
        """Let a row whose prompt is computed decode."""
        if row not in self._seats:
            self.seat(row)
        self._batch.add(self._seats[row])

    def rebase(self, row: Row, length: int) -> None:
        """Let a row that was stored read so much of its prompt where it is stored, and drop its own
        copy of it, unless that is short.
        """
        seat = self._seats[row]

        def rebased(lease: PromptLease) -> bool:
            if not is_worth_a_span(lease.length - seat.reach, alone=True):
                return False
            self._batch.rebase(seat, _pieces(lease))
            return True

        self._exchange(row, length, rebased)

    def step(self) -> list[RowToken]:
        """One token for each row (none for rows that joined just now)."""
        rows, stops = self._rows, self._stops
        received: list[RowToken] = []
        tokens = self._batch.step()
        self._unpin()
        for seat, token, logprob in tokens:
            row = rows.get(seat)
            if row is None:
                continue
            reason: FinishReason | None = None
            finished = seat.grammar is not None and seat.grammar.finished
            if token in stops or finished:
                reason = "stop"
            elif len(seat.outputs) == seat.max_tokens:
                reason = "length"
            if reason is not None:
                self._ended.add(row)
            received.append(RowToken(row, token, reason, logprob))
        return received

    def holds(self, row: Row) -> bool:
        """Whether the row was taken in, and not removed."""
        return row in self._seats

    def reads(self, row: Row) -> int:
        """How many tokens a row that was taken in reads where the cache holds them."""
        return self._seats[row].reach

    def computed(self, row: Row) -> tuple[Tokens, SeatRow]:
        """What of a row was forwarded, and the row as it can be put."""
        seat = self._seats[row]
        held = self._batch.row(seat)
        output = np.array(seat.outputs, np.uint32)
        return np.concatenate([row.sequence, output])[: held.length], held

    def remove(self, row: Row) -> None:
        """Take a row out. Doing so again is harmless."""
        seat = self._seats.pop(row, None)
        self._ended.discard(row)
        if seat is not None:
            del self._rows[seat]
            self._copied.discard(seat)
            self._batch.remove(seat)

    def reset(self) -> None:
        """Drop all rows, after a step that failed."""
        self._seats, self._rows, self._ended, self._copied = {}, {}, set(), set()
        self._batch = self._new_batch()

    def close(self) -> None:
        """End the batch."""
        self.reset()

    def statistics(self) -> DecodeStatistics:
        """The batch as it is."""
        return self._batch.statistics()

    def check_integrity(self) -> None:
        """Assert that every seat has a row and a tail of the right length."""
        assert not self._ended
        assert len(self._seats) == len(self._rows) == self._batch.statistics().rows
        self._batch.check_integrity()

    def _renew(self, row: Row) -> None:
        """Lease what was stored of the row meanwhile, so that nothing of it needs a copy."""
        if row.reads_cache:
            leased = row.lease.length if row.lease is not None else 0
            # No more than it has computed itself, whoever stored more of the same prompt.
            self._exchange(row, row.position, lambda lease: lease.length > leased)

    def _may_copy(self, seat: Seat, reach: int) -> bool:
        """Whether there is memory for what a seat would read in its tail from now on."""
        if not self._afford(self._rows[seat], reach):
            return False
        if reach < seat.reach:
            self._copied.add(seat)
        return True

    def _unpin(self) -> None:
        """Give back what rows have leased and copied."""
        while self._copied:
            seat = self._copied.pop()
            row = self._rows[seat]
            if row.lease is not None and seat.reach < row.lease.length:
                self._shorten(row, seat)

    def _shorten(self, row: Row, seat: Seat) -> None:
        """Pin no more than what the row reads where it lies, if a lease on that is to be had."""
        assert row.lease is not None
        if seat.reach:
            read = {piece.extent for piece in seat.path}

            def keeps_all(lease: PromptLease) -> bool:
                # The cache may have been cleared, and the same tokens stored again somewhere else.
                return lease.length == seat.reach and read <= {r.extent for r in lease.ranges}

            self._exchange(row, seat.reach, keeps_all)
        else:
            row.lease.release()
            row.lease = None

    def _exchange(self, row: Row, length: int, accept: Callable[[PromptLease], bool]) -> None:
        """Lease the first `length` tokens of a row's prompt, or what the cache has of them, in
        place of what the row has leased, if `accept` says so. Whatever happens, the row has one
        lease and the other is released.
        """
        lease = self._cache.renew(row.sequence[: length + 1], row.namespace)
        if lease is None:
            return
        unused: PromptLease | None = lease
        try:
            if accept(lease):
                unused, row.lease = row.lease, lease
        finally:
            if unused is not None:
                unused.release()

    def _is_private(self, row: Row, seat: Seat) -> bool:
        """Whether the last piece that a row reads is better copied into its tail."""
        if row.lease is None or not seat.path:
            return False
        tokens = seat.path[-1].stop - seat.path[-1].start
        if self._cache.readers(row.lease) > 1 or is_worth_a_span(tokens, alone=True):
            return False
        # The row was promised memory for what it does not read in the cache, and no more.
        return tokens * self._layout.bytes_per_token <= self._cache.free_bytes

    def _seat(self, row: Row) -> Seat:
        return Seat(
            _pieces(row.lease) if row.lease is not None else (),
            self._segments(row),
            kinds.states_of(row.caches)
            if row.caches and row.position
            else zero_states(self._layout),
            length=row.position,
            ahead=row.sequence[row.position : -1],
            token=int(row.sequence[-1]),
            max_tokens=row.left,
            sampler=row.sampler,
            grammar=row.grammar,
            top_logprobs=row.top_logprobs,
            prompt_logprobs=row.asking,
        )

    def _segments(self, row: Row) -> Sequence[Sequence[Segment]]:
        if not row.position:
            return [() for _ in self._layout.leaves]
        return kinds.segments_of(row.caches) if row.caches else ()

    def _new_batch(self) -> DecodeBatch:
        return DecodeBatch(
            self._model.model,
            self._layout,
            self._limits,
            ahead=self._ahead,
            afford=self._may_copy,
        )


def _pieces(lease: PromptLease) -> list[Piece]:
    return [Piece(each.extent, each.start, each.stop) for each in lease.ranges]
