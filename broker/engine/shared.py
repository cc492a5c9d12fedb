"""Decoding with shared prefixes: rows keep their lease, and only their tails are their own."""

import numpy as np

from ..cache import kinds
from ..cache.layout import Layout
from ..cache.prefix_hash import Tokens
from ..cache.prompt_cache import PromptCache
from ..models import LoadedModel
from ..request import TokenLogprob
from .decode_batch import DecodeBatch, DecodeStatistics, private_piece
from .row import Row, RowToken
from .seat import Seat, SeatRow, zero_states
from .sharing import Piece


class SharedDecoder:
    """Decodes rows in a `DecodeBatch`. After a `step` that raised, `reset` starts anew."""

    def __init__(self, model: LoadedModel, cache: PromptCache, layout: Layout) -> None:
        self._model = model
        self._cache = cache
        self._layout = layout
        self._stops = frozenset(model.tokenizer.eos_token_ids)
        self._seats: dict[Row, Seat] = {}
        self._rows: dict[Seat, Row] = {}
        self._ended: set[Row] = set()
        self._batch = self._new_batch()

    @property
    def running(self) -> list[Row]:
        """The rows that decode."""
        return [row for row in self._seats if row not in self._ended]

    def join(self, row: Row) -> None:
        """Let a row take part. Its lease is exchanged for one on all that is stored of it."""
        self._renew(row)
        seat = self._seat(row)
        if private_piece(seat, list(self._rows)):
            seat.cut_path(seat.path[-1].start)
            self._shorten(row, seat.reach)
        self._seats[row], self._rows[seat] = seat, row
        self._batch.add(seat)

    def step(self) -> list[RowToken]:
        """One token for each row (none for rows that joined just now)."""
        received = self._batch.step()
        return [self._received(*each) for each in received if each[0] in self._rows]

    def holds(self, row: Row) -> bool:
        """Whether the row decodes, or has ended and was not removed."""
        return row in self._seats

    def computed(self, row: Row) -> tuple[Tokens, SeatRow]:
        """What of a row was forwarded, and the row as it can be put."""
        seat = self._seats[row]
        held = self._batch.row(seat)
        output = np.array(seat.outputs, np.uint32)
        return np.concatenate([row.prompt, output])[: held.length], held

    def remove(self, row: Row) -> None:
        """Take a row out. Doing so again is harmless."""
        seat = self._seats.pop(row, None)
        self._ended.discard(row)
        if seat is not None:
            del self._rows[seat]
            self._batch.remove(seat)

    def reset(self) -> None:
        """Drop all rows, after a step that failed."""
        self._seats, self._rows, self._ended = {}, {}, set()
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

    def _received(self, seat: Seat, token: int, logprob: TokenLogprob | None) -> RowToken:
        row = self._rows[seat]
        reason = None
        if token in self._stops:
            reason = "stop"
        elif len(seat.outputs) == seat.max_tokens:
            reason = "length"
        if reason is not None:
            self._ended.add(row)
        return RowToken(row, token, reason, logprob)

    def _renew(self, row: Row) -> None:
        """Lease what was stored of the prompt meanwhile, so that nothing of it needs a copy."""
        if not row.reads_cache:
            return
        lease = self._cache.renew(row.prompt, row.namespace)
        if lease is None:
            return
        if row.lease is not None:
            if lease.length <= row.lease.length:
                lease.release()
                return
            row.lease.release()
        row.lease = lease

    def _shorten(self, row: Row, reach: int) -> None:
        """Pin no more than what the row reads where it lies, if that is a usable length."""
        assert row.lease is not None
        shorter = self._cache.renew(row.prompt[: reach + 1], row.namespace) if reach else None
        if reach and (shorter is None or shorter.length != reach):
            if shorter is not None:
                shorter.release()
            return
        row.lease.release()
        row.lease = shorter

    def _seat(self, row: Row) -> Seat:
        ranges = row.lease.ranges if row.lease is not None else ()
        leaves = self._layout.leaves
        return Seat(
            [Piece(each.extent, each.start, each.stop) for each in ranges],
            kinds.segments_of(row.caches) if row.position else [() for _ in leaves],
            kinds.states_of(row.caches) if row.position else zero_states(self._layout),
            length=row.position,
            token=int(row.prompt[-1]),
            max_tokens=row.max_tokens,
            sampler=row.sampler,
            top_logprobs=row.top_logprobs,
        )

    def _new_batch(self) -> DecodeBatch:
        return DecodeBatch(self._model.model, self._layout)
