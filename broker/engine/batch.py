"""The batch lane: continuous batching over stock mlx-lm models.

A long prompt is prefilled alone, chunk by chunk, on the lease's own caches; short rests of prompts
are prefilled together, in the batch, where all rows decode. They share their prefixes
(`shared.py`), unless the model cannot use our caches: then each has a copy (`replicated.py`), and
the statistics say why.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import mlx.core as mx
from msgspec import Struct

from ..affinity import ThreadGuard
from ..backend import describe
from ..cache.intake import Row as StoredRow
from ..cache.layout import Layout
from ..cache.prefix_hash import Tokens, as_tokens
from ..cache.prompt_cache import PromptCache
from ..cache.restores import Restoration
from ..models import LoadedModel
from .ahead import TILE_ALONE, Ahead
from .batch_test import batch_test
from .decode_batch import DecodeStatistics
from .pace import LEAST_CUDA, Pace
from .replicated import ReplicatedDecoder, unbatchable
from .row import Row, RowToken
from .row_caches import RowCaches
from .self_test import self_test
from .shared import SharedDecoder
from .shared_attention import Implementation


class LaneStatistics(Struct, frozen=True, kw_only=True):
    """How rows decode, `shared` or `replicated`, why not shared, and what the batch holds now.

    `attention` is what serves the model's layers (`kernel`, `fused`, `scores`), and why.
    """

    prefixes: Literal["shared", "replicated"]
    reason: str
    attention: tuple[Implementation, ...]
    batch: DecodeStatistics


class Decoder(Protocol):
    """Decodes the rows that joined it; a failed `step` loses them all, `reset` starts anew."""

    @property
    def running(self) -> list[Row]: ...
    @property
    def rows(self) -> list[Row]: ...
    @property
    def spans(self) -> tuple[tuple[int, int], ...]: ...
    def join(self, row: Row) -> None: ...
    def step(self) -> list[RowToken]: ...
    def holds(self, row: Row) -> bool: ...
    def computed(self, row: Row) -> tuple[Sequence[int] | Tokens, Sequence[Any] | StoredRow]: ...
    def remove(self, row: Row) -> None: ...
    def reset(self) -> None: ...
    def close(self) -> None: ...
    def statistics(self) -> DecodeStatistics: ...
    def check_integrity(self) -> None: ...


class BatchLane:
    """Runs rows from their lease to their last token. All calls from the thread that owns MLX.

    A method that raises leaves the lane usable; the row it was called for is then given up with
    `discard`. If `step` raises, all `rows` of the batch are lost: `reset` starts an empty one.
    `pace` sizes the pieces of prompts, `afford` asks for the memory of a row that reads only so
    many tokens where the cache holds them. `unbatchable` says why no row of this model can be in a
    batch, "" if they can: then they need the serial lane, which shares `row_caches` and `ahead`.
    """

    def __init__(
        self,
        model: LoadedModel,
        cache: PromptCache,
        max_rows: int,
        pace: Pace | None = None,
        afford: Callable[[Row, int], bool] = lambda row, reach: True,
        name: str = "",
    ) -> None:
        self._guard = ThreadGuard()
        self._guard.check()
        self._model = model
        self._cache = cache
        self._pace = pace or Pace(TILE_ALONE)
        self.name = name or model.name
        self.max_rows = max_rows
        self.preempts = True
        self.row_caches = RowCaches(model, cache, self_test(model.model))
        self.exact_stops = self.row_caches.exact_stops
        self._verdict = batch_test(model.model, model.make_caches)
        layout = self._verdict.layout
        self.aligned = LEAST_CUDA if describe().device == "cuda" else 0
        """Prompts are computed alone up to multiples of so many tokens; 0: up to any."""
        self.ahead = Ahead(self._note_prefill)
        self._shared = (
            SharedDecoder(model, cache, self._verdict, self.ahead, afford)
            if layout is not None
            else None
        )
        self._decoder: Decoder = self._shared or ReplicatedDecoder(model, max_rows)
        self.unbatchable = "" if self._shared is not None else unbatchable(model.make_caches())

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """What the last step read once for several rows: tokens, and how many rows, of each."""
        return self._decoder.spans

    def chunk(self, decoding: bool) -> int:
        """Prompt tokens to compute at once; with `decoding`, between two steps."""
        return self._pace.chunk(decoding=decoding)

    @property
    def running(self) -> Sequence[Row]:
        """The rows that decode."""
        return self._decoder.running

    @property
    def rows(self) -> Sequence[Row]:
        """The rows in the batch: those that decode, and those whose prompt is computed there."""
        return self._decoder.rows

    @property
    def layout(self) -> Layout | None:
        """The layout of the model's caches, as far as it is known."""
        return self._verdict.layout or self._verdict.fallback

    def kv_bytes(self, tokens: int, shared: int) -> int:
        """Bytes of the KV of a row's own `tokens`, where `shared` more are read in the cache.

        0 for a model whose caches no codec knows: that takes what it takes.
        """
        layout = self.layout
        if layout is None:
            return 0
        copied = shared if self._verdict.layout is None else 0
        return layout.bytes_per_token * (tokens + copied) + layout.state_bytes

    def draft_bytes(self, row: Row) -> int:
        """None: a row with a draft model needs the serial lane."""
        return 0

    def put_points(self, start: int, end: int) -> tuple[int, ...]:
        """Where to store a prompt that is computed over [start, end), so that the batch can compute
        the odd rest of it.
        """
        last = end - end % self.aligned if self.aligned else 0
        is_alone = self._shared is not None and end - start > self._verdict.prefill.tokens
        return (last,) if is_alone and last > start else ()

    def open(self, row: Row, restoration: Restoration | None = None) -> None:
        """Give the row its caches: a clone of what the prompt cache has, or empty ones.

        `restoration` is what was read for it from the tier below, if anything was.
        """
        self._guard.check()
        self.row_caches.lease(row, restoration)
        if not self.can_seat(row):
            self.row_caches.fill(row)

    def can_seat(self, row: Row) -> bool:
        """Whether the rest of the row's prompt is to be computed in the batch, once seated."""
        return self._shared is not None and not self.holds(row) and self._shared.can_seat(row)

    def seat(self, row: Row) -> None:
        """Take the row into the batch, as `can_seat` said. Its lease may change."""
        self._guard.check()
        assert self._shared is not None
        self._shared.seat(row)

    def holds(self, row: Row) -> bool:
        """Whether the row has been taken into the batch."""
        return self._decoder.holds(row)

    def reads(self, row: Row) -> int:
        """How many tokens a row reads where the cache holds them."""
        if self._shared is not None and self._shared.holds(row):
            return self._shared.reads(row)
        return row.lease.length if row.lease is not None else 0

    @property
    def donates(self) -> bool:
        """Whether a row in the batch can be stored at any time."""
        return self._shared is not None and self._shared.donates

    def computed(self, row: Row) -> Tokens:
        """The tokens of a row in the batch that could be stored now."""
        return as_tokens(self._decoder.computed(row)[0])

    def prefill_together(self, parts: Sequence[tuple[Row, int]]) -> None:
        """Start computing the prompts of rows in the batch, each up to a position; returns when the
        piece before is computed.
        """
        self._guard.check()
        assert self._shared is not None
        self._shared.prefill(parts)

    def prefill(self, row: Row, stop: int) -> None:
        """Start computing the prompt tokens of a row outside the batch up to `stop`; returns when
        the piece before is computed.
        """
        self._guard.check()
        self.ahead.compute(self._model.model, row, stop)

    def store(self, row: Row, shared: int) -> bool:
        """Put what the row has computed; whether the cache took it.

        A row in the batch reads the first `shared` tokens where they are stored from then on.
        """
        if not self.row_caches.put(row, *self._computed(row)):
            return False
        row.stored = row.position
        if self._shared is not None and self._shared.holds(row):
            self._shared.rebase(row, shared)
        return True

    def join(self, row: Row) -> None:
        """Let the row, whose prompt is computed up to its last token, decode with the others."""
        self._guard.check()
        self._decoder.join(row)
        if self._shared is None:
            self.row_caches.let_go(row)

    def step(self) -> list[RowToken]:
        """One token for each running row (none for rows that joined just now).

        A row with a finish reason has left the batch; end it with `keep` or `discard`.
        """
        self._guard.check()
        began = time.perf_counter()
        tokens = self._decoder.step()
        if tokens:
            self._pace.note_step(time.perf_counter() - began)
        return tokens

    def keep(self, row: Row) -> int:
        """End the row wherever it is and put what it computed; how many tokens were kept."""
        self._guard.check()
        try:
            tokens, held = self._computed(row)
            return len(tokens) if len(tokens) and self.row_caches.put(row, tokens, held) else 0
        finally:
            self.discard(row)

    def discard(self, row: Row) -> None:
        """End the row wherever it is, and keep nothing."""
        self._guard.check()
        self._decoder.remove(row)
        self.row_caches.let_go(row)

    def reset(self) -> None:
        """Drop the batch after a step that failed; its rows have left."""
        self._guard.check()
        self._decoder.reset()

    def close(self) -> None:
        """End the batch and wait for what still runs."""
        self._guard.check()
        self._decoder.close()
        # A thread that ends with work in flight can abort the process.
        mx.synchronize()

    def statistics(self) -> LaneStatistics:
        """How rows decode, and what the batch holds now."""
        return LaneStatistics(
            prefixes="replicated" if self._shared is None else "shared",
            reason=self._verdict.test.reason,
            attention=self._verdict.attention,
            batch=self._decoder.statistics(),
        )

    def check_integrity(self) -> None:
        """Assert what must hold between two turns."""
        self._decoder.check_integrity()

    def _note_prefill(self, tokens: int, seconds: float) -> None:
        self._pace.note_prefill(tokens, seconds)
        self._cache.note_prefill(tokens, seconds, self.row_caches.namespaces)

    def _computed(self, row: Row) -> tuple[Sequence[int] | Tokens, Sequence[Any] | StoredRow]:
        if self._decoder.holds(row):
            return self._decoder.computed(row)
        return row.sequence[: row.position if row.caches else 0], row.caches
