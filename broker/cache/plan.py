"""What a look-up found, and what the cache hands out: the types of its interface. No MLX."""

from types import TracebackType
from typing import Any, Protocol, Self

from msgspec import Struct

from ..trace.events import Divergence, MissReason
from .prefix_hash import Tokens


class Plan(Struct, frozen=True, kw_only=True):
    """Where the KV of a prompt would come from, without touching anything.

    `ram_tokens` is the deepest usable length over all entries in RAM, at most `prompt_tokens` - 1.
    `cold_tokens` is what a restore would add to it (0 if the cold tier has nothing longer, or the
    cost gate says that computing is cheaper). `reason` says why the usable length ends there; it is
    None when only the last token is left to compute. `donor` names the entry that serves the match.
    """

    prompt_tokens: int
    ram_tokens: int
    cold_tokens: int = 0
    donor: str | None = None
    reason: MissReason | None = None
    divergence: Divergence | None = None

    @property
    def usable_tokens(self) -> int:
        """Prompt tokens that need not be computed."""
        return self.ram_tokens + self.cold_tokens

    @property
    def to_prefill(self) -> int:
        """Prompt tokens that must be computed."""
        return self.prompt_tokens - self.usable_tokens


class Lease(Protocol):
    """A clone of a donor's first `length` tokens and the pins that keep its extents alive.

    `caches` holds one cache object a layer, at offset `length`; running the model on them never
    changes the donor. A context manager; releasing twice is harmless.
    """

    @property
    def tokens(self) -> Tokens: ...
    @property
    def length(self) -> int: ...
    @property
    def caches(self) -> list[Any]: ...
    @property
    def ram_tokens(self) -> int: ...
    @property
    def cold_tokens(self) -> int: ...
    def release(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
