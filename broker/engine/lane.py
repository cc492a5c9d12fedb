"""What the engine's loop asks of a lane, whether that runs many rows together or one at a time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ..cache.prefix_hash import Tokens
from ..cache.restores import Restoration
from .work import LanePolicy

if TYPE_CHECKING:
    from .row import Row, RowToken


class Lane(LanePolicy, Protocol):
    """Runs rows of one model from their lease to their last token, in the thread that owns MLX.

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
        """The rows in the lane: those that decode, and those whose prompt is computed there."""

    def kv_bytes(self, tokens: int, shared: int) -> int:
        """Bytes of the KV of a row's own `tokens`, where `shared` more are read in the cache."""

    def put_points(self, start: int, end: int) -> tuple[int, ...]:
        """Where, besides, to store a prompt that is computed over [start, end)."""

    def open(self, row: "Row", restoration: Restoration | None = None) -> None:
        """Give the row its caches; `restoration` is what was read for it from the tier below."""

    def can_seat(self, row: "Row") -> bool:
        """Whether the rest of the row's prompt is to be computed in the batch, once seated."""

    def seat(self, row: "Row") -> None:
        """Take the row into the batch, as `can_seat` said. Its lease may change."""

    def holds(self, row: "Row") -> bool:
        """Whether the row has been taken into the batch."""

    def reads(self, row: "Row") -> int:
        """How many tokens a row reads where the cache holds them."""

    def computed(self, row: "Row") -> Tokens:
        """The tokens of a row that could be stored now."""

    def prefill_together(self, parts: "Sequence[tuple[Row, int]]") -> None:
        """Start computing the prompts of rows in the batch, each up to a position."""

    def prefill(self, row: "Row", stop: int) -> None:
        """Start computing the prompt tokens of a row outside the batch, up to `stop` or further."""

    def store(self, row: "Row", shared: int) -> bool:
        """Put what the row has computed; whether the cache took it."""

    def join(self, row: "Row") -> None:
        """Let the row, whose prompt is computed up to its last token, decode."""

    def step(self) -> "list[RowToken]":
        """The next tokens of the running rows; none for rows that joined just now."""

    def keep(self, row: "Row") -> int:
        """End the row wherever it is and put what it computed; how many tokens were kept."""

    def discard(self, row: "Row") -> None:
        """End the row wherever it is, and keep nothing."""

    def reset(self) -> None:
        """Drop the rows of a step that failed."""

    def close(self) -> None:
        """End the lane and wait for what still runs."""

    def check_integrity(self) -> None:
        """Assert what must hold between two turns."""
