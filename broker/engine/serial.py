"""The serial lane: one row decodes at a time, in mlx-lm's own generators.

For rows that no batch can take: of models whose caches cannot be batched, `deterministic` ones,
and those with a draft model. They take from the prompt cache and put into it as others do, but for
the deterministic ones, which leave no trace there.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import mlx.core as mx
from msgspec import Struct

from ..affinity import ThreadGuard
from ..cache.kinds import layout_of
from ..cache.layout import Layout
from ..cache.prefix_hash import Tokens
from ..cache.prompt_cache import PromptCache
from ..cache.restores import Restoration
from ..errors import EngineFailed, InvalidSetting
from ..models import LoadedModel, namespace_digest
from .ahead import TILE_ALONE, Ahead, arrays_of
from .drafts import NO_DRAFTS
from .pace import Pace
from .row import DraftKV, Row, RowToken
from .row_caches import RowCaches
from .self_test import self_test
from .serial_runs import PlainRun, Run
from .speculation import DraftCounts, SpeculativeRun

STOCK_PIECE = 2048
"""Prompt tokens of one call of the model in mlx-lm's `generate_step`, by default."""

DRAFT_TOKENS = 3
MAX_DRAFT_TOKENS = 16
"""Tokens that a draft model proposes at a time: what is usual, and at most."""


class SerialStatistics(Struct, frozen=True, kw_only=True):
    """Rows that decode now, and what draft models have come to so far: rounds, the tokens that
    they proposed in them, and how many of these were taken.
    """

    rows: int
    rounds: int
    drafted_tokens: int
    accepted_tokens: int


class SerialLane:
    """Runs one row at a time from its join to its last token; the prompts of others may be computed
    meanwhile. All calls from the thread that owns MLX.

    `row_caches`, `layout`, `ahead` and `pace` are those of the model's batch lane. `drafts` are the
    models that may propose tokens, `draft_tokens` of them at a time. Failures are dealt with as in
    `Lane`.
    """

    donates = False
    max_rows = 1
    preempts = False
    spans = ()

    def __init__(
        self,
        model: LoadedModel,
        cache: PromptCache,
        row_caches: RowCaches,
        layout: Layout | None,
        ahead: Ahead,
        drafts: Mapping[str, LoadedModel] = NO_DRAFTS,
        draft_tokens: int = DRAFT_TOKENS,
        pace: Pace | None = None,
        name: str = "",
    ) -> None:
        if not 1 <= draft_tokens <= MAX_DRAFT_TOKENS:
            raise InvalidSetting(
                f"draft_tokens is {draft_tokens}; it must be in [1, {MAX_DRAFT_TOKENS}]"
            )
        self._guard = ThreadGuard()
        self._guard.check()
        self._model = model
        self._cache = cache
        self._row_caches = row_caches
        self._layout = layout
        self._ahead = ahead
        self._pace = pace or Pace(TILE_ALONE)
        self.name = name or model.name
        self.exact_stops = row_caches.exact_stops
        self._drafts = drafts
        self._draft_tokens = draft_tokens
        self._known_drafts: dict[str, _Draft] = {}
        self._counts = DraftCounts()
        self._row: Row | None = None
        self._run: Run | None = None

    @property
    def running(self) -> list[Row]:
        """The row that decodes, if one does."""
        return [] if self._run is None or self._run.ended else self.rows

    @property
    def rows(self) -> list[Row]:
        """The row that decodes, or has ended and was not removed."""
        return [] if self._row is None else [self._row]

    def kv_bytes(self, tokens: int, shared: int) -> int:
        """Bytes of the KV of a row's own `tokens`, where `shared` more are read in the cache.

        0 for a model whose caches no codec knows: that takes what it takes. `draft_bytes` come on
        top.
        """
        if self._layout is None:
            return 0
        copied = 0 if self._row_caches.self_test.passed else shared
        return self._layout.bytes_per_token * (tokens + copied) + self._layout.state_bytes

    def draft_bytes(self, row: Row) -> int:
        """Bytes of KV that the row's draft model may come to need, whatever the cache has of it."""
        if not row.request.draft:
            return 0
        layout = self._draft(row.request.draft).layout
        return layout.bytes_per_token * (len(row.prompt) + row.max_tokens)

    def chunk(self, decoding: bool) -> int:
        """Prompt tokens to compute at once; with `decoding`, between two steps."""
        return self._pace.chunk(decoding=decoding)

    def put_points(self, start: int, end: int) -> tuple[int, ...]:
        """None but the prompt cache's."""
        return ()

    def open(self, row: Row, restoration: Restoration | None = None) -> None:
        """Give the row its caches, and its draft model's: clones of what the prompt cache has."""
        self._guard.check()
        self._row_caches.lease(row, restoration)
        self._row_caches.fill(row)
        if row.request.draft:
            draft = self._draft(row.request.draft)
            namespace = namespace_digest(draft.model.identity, tenant=row.request.tenant)
            row.draft = DraftKV(row.id, draft.model, namespace, reads_cache=row.reads_cache)
            row.draft.position = draft.row_caches.lease_resident(row.draft, row.prompt)
            draft.row_caches.fill(row.draft)

    def can_seat(self, row: Row) -> bool:
        """Never: every prompt is computed by itself."""
        return False

    def seat(self, row: Row) -> None:
        """Not to be called."""
        raise AssertionError("the serial lane has no seats")

    def holds(self, row: Row) -> bool:
        """Whether the row has joined and was not removed."""
        return row is self._row

    def reads(self, row: Row) -> int:
        """How many tokens a row reads where the cache holds them."""
        return row.lease.length if row.lease is not None else 0

    def computed(self, row: Row) -> Tokens:
        """The tokens whose KV the row will leave when it is kept."""
        if self._run is not None and self.holds(row):
            return self._run.forwarded
        return row.prompt[: row.position if row.caches else 0]

    def prefill_together(self, parts: Any) -> None:
        """Not to be called."""
        raise AssertionError("the serial lane computes no prompts together")

    def prefill(self, row: Row, stop: int) -> None:
        """Start computing the row's prompt tokens up to `stop`; returns when the piece before is
        computed.

        A deterministic row's next piece is mlx-lm's, whole, wherever `stop` is: its position says
        where that ends.
        """
        self._guard.check()
        if row.request.deterministic:
            stop = min(row.position + STOCK_PIECE, len(row.prompt) - 1)
        self._ahead.compute(self._model.model, row, stop)

    def store(self, row: Row, shared: int) -> bool:
        """Put what of its prompt the row has computed; whether the cache took it."""
        if self.holds(row) or not self._row_caches.put(row, self.computed(row), row.caches):
            return False
        row.stored = row.position
        return True

    def join(self, row: Row) -> None:
        """Let the row, whose prompt is computed up to its last token, decode. Nobody else may."""
        self._guard.check()
        assert self._row is None, f"{self._row.id} decodes in the serial lane"
        if row.draft is not None:
            self._run = SpeculativeRun(
                row, row.draft, self._model, self._draft_tokens, self._counts
            )
        else:
            self._run = PlainRun(row, self._model)
        self._row = row

    def step(self) -> list[RowToken]:
        """The running row's next token, or with a draft model all that one round gives.

        There are none while the draft model still computes the prompt. A row with a finish reason
        has left; end it with `keep` or `discard`.
        """
        self._guard.check()
        return [] if self._run is None or self._run.ended else self._run.next()

    def keep(self, row: Row) -> int:
        """End the row wherever it is and put what it computed; how many tokens were kept."""
        self._guard.check()
        try:
            tokens = self.computed(row)
            self._close_run(row)
            if row.draft is not None:
                self._keep_draft(row, row.draft)
            kept = len(tokens) and self._row_caches.put(row, tokens, row.caches)
            return len(tokens) if kept else 0
        finally:
            self.discard(row)

    def discard(self, row: Row) -> None:
        """End the row wherever it is, and keep nothing."""
        self._guard.check()
        try:
            self._close_run(row)
        finally:
            if row is self._row:
                self._row = self._run = None
            self._row_caches.let_go(row)
            if row.draft is not None:
                self._row_caches.let_go(row.draft)

    def reset(self) -> None:
        """Drop the row that decoded, after a step that failed; nothing it computed is stored."""
        self._guard.check()
        row, run, self._row, self._run = self._row, self._run, None, None
        if row is not None:
            row.caches = []
        if run is not None:
            with suppress(Exception):  # what it leaves in the caches is nobody's
                run.close()

    def close(self) -> None:
        """End the row that decodes and wait for what still runs."""
        self._guard.check()
        if self._row is not None:
            self.discard(self._row)
        # A thread that ends with work in flight can abort the process.
        mx.synchronize()

    def statistics(self) -> SerialStatistics:
        """Who decodes, and how well drafts did."""
        return SerialStatistics(
            rows=len(self.running),
            rounds=self._counts.rounds,
            drafted_tokens=self._counts.drafted,
            accepted_tokens=self._counts.accepted,
        )

    def check_integrity(self) -> None:
        """Assert that no row that ended is still kept, and that one that runs has its caches."""
        assert (self._row is None) == (self._run is None)
        if self._row is not None and self._run is not None:
            assert not self._run.ended
            assert self._row.caches
            assert self._row.position == len(self._row.prompt) - 1

    def _keep_draft(self, row: Row, draft: DraftKV) -> None:
        run = self._run if self.holds(row) else None
        if isinstance(run, SpeculativeRun):
            tokens = run.forwarded_by_draft
        else:
            tokens = row.prompt[: draft.position]
        if len(tokens):
            self._row_caches.put(draft, tokens, draft.caches)

    def _close_run(self, row: Row) -> None:
        if self._run is not None and self.holds(row):
            self._run.close()

    def _draft(self, name: str) -> "_Draft":
        """The draft model of that name as it is loaded now."""
        model, known = self._drafts.get(name), self._known_drafts.get(name)
        if model is None:
            raise EngineFailed(f"the draft model {name!r} is not loaded any more")
        if known is None or known.model is not model:
            row_caches = RowCaches(model, self._cache, self_test(model.model))
            known = self._known_drafts[name] = _Draft(model, row_caches, _layout_of(model))
        return known


class _Draft(NamedTuple):
    model: LoadedModel
    row_caches: RowCaches
    layout: Layout


def _layout_of(model: LoadedModel) -> Layout:
    caches = model.make_caches()
    model.model(mx.array([[0]]), cache=caches)
    mx.eval(arrays_of(caches))
    return layout_of(caches)
