"""What the loop asks of a lane: the seam between what is next and how rows are computed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from ..cache.prefix_hash import Tokens
from ..cache.restores import Restoration
from .work import LanePolicy

if TYPE_CHECKING:
    from .row import Row, RowToken


class Lane(LanePolicy, Protocol):
    """Runs rows from their lease to their last token. All calls from the thread that owns MLX.

    A row is opened, its prompt computed up to its last token (alone, or seated among others), then
    it joins and gets its tokens from `step`, until `keep` or `discard` ends it, in whatever state.
    A method that raises leaves the lane usable; the row it was called for is then given up with
    `discard`. If `step` raises, all `rows` are lost: `reset` starts anew.
    """

    @property
    def name(self) -> str:
        """The name of its model."""

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """What its last step read once for several rows: tokens, and how many rows, of each."""

    @property
    def running(self) -> "Sequence[Row]":
        """The rows that decode."""

    @property
    def rows(self) -> "Sequence[Row]":
        """The rows taken in: those that decode, and those whose prompt is computed among them."""

    def kv_bytes(self, tokens: int, shared: int) -> int:
        """Bytes of the KV of a row's own `tokens`, where `shared` more are read in the cache."""

    def draft_bytes(self, row: "Row") -> int:
        """Bytes of the KV that a draft model may come to need for the row, on top."""

    def put_points(self, start: int, end: int) -> tuple[int, ...]:
        """Where, besides, to store a prompt that is computed over [start, end)."""

    def open(self, row: "Row", restoration: Restoration | None = None) -> None:
        """Give the row its caches, what `restoration` read for it included."""

    def can_seat(self, row: "Row") -> bool:
        """Whether the rest of the row's prompt is to be computed among others, once seated."""

    def seat(self, row: "Row") -> None:
        """Take the row in, as `can_seat` said."""

    def holds(self, row: "Row") -> bool:
        """Whether the row has been taken in."""

    def reads(self, row: "Row") -> int:
        """How many tokens a row reads where the cache holds them."""

    def computed(self, row: "Row") -> Tokens:
        """The tokens of a row taken in that could be stored now, where the lane `donates`."""

    def prefill_together(self, parts: "Sequence[tuple[Row, int]]") -> None:
        """Start computing the prompts of rows taken in, each up to a position."""

    def prefill(self, row: "Row", stop: int) -> None:
        """Start computing the prompt of a row that was not taken in, up to `stop`.

        `row.position` says afterwards how far that went: a lane may go in steps of its own.
        """

    def store(self, row: "Row", shared: int) -> bool:
        """Put what the row has computed; whether the cache took it."""

    def join(self, row: "Row") -> None:
        """Let the row, whose prompt is computed up to its last token, decode."""

    def step(self) -> "list[RowToken]":
        """The next tokens of running rows, those of one row in their order; there may be none.

        A row with a finish reason has left; end it with `keep` or `discard`.
        """

    def keep(self, row: "Row") -> int:
        """End the row wherever it is and put what it computed; how many tokens were kept."""

    def discard(self, row: "Row") -> None:
        """End the row wherever it is, and keep nothing."""

    def reset(self) -> None:
        """Drop the rows taken in, after a step that failed."""

    def close(self) -> None:
        """End everything and wait for what still runs."""

    def statistics(self) -> Struct:
        """How rows are computed, and what the lane holds now."""

    def check_integrity(self) -> None:
        """Assert what must hold between two turns."""
