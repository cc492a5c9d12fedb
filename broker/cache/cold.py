"""The seam to the tier below RAM: what the cache asks of a store, and of sinks for evictions."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from msgspec import Struct

from .lease import PromptLease
from .plan import Lease
from .prefix_hash import Tokens
from .statistics import ColdStatistics

if TYPE_CHECKING:
    from .intake import Row


class ColdMatch(Struct, frozen=True, kw_only=True):
    """The longest stored sequence that serves a prompt: its name there, tokens, bytes to read.

    Only [start, length) is read; the tokens before are those that RAM was said to have.
    """

    name: str
    length: int
    bytes: int
    start: int = 0


class Restored(NamedTuple):
    """What was read, at the match's length, evaluated: stock mlx-lm cache objects, or a row that
    holds at least [start, length).

    `release` is called once, when neither the entry made of it nor a clone of that is left.
    """

    caches: "Sequence[Any] | Row"
    release: Callable[[], None] | None = None


class ColdWrite(NamedTuple):
    """Something to store: clones at offset len(tokens), and the ranges of extents they read, if
    any; as far as the cache knows, [start, len(tokens)) is not stored yet.

    The store owns the clones until it calls `done`, exactly once and from any thread, with None
    when the sequence would survive a crash, or with what went wrong.
    """

    namespace: str
    tokens: Tokens
    start: int
    bytes: int
    lease: PromptLease
    done: Callable[[Exception | None], None]


class Flushed(NamedTuple):
    """What a flush left undone: writes, and bytes of them, that are not durable yet.

    (0, 0) is the best outcome: all that there was is on disk.
    """

    writes: int
    bytes: int


class ColdStore(Protocol):
    """A place for sequences that outlives RAM. `find` must be cheap: it runs for every plan."""

    @property
    def losses(self) -> int:
        """How often it let something go: while this is the same, what it stored is still there."""
        ...

    def find(self, tokens: Tokens, namespace: str, held: int = 0) -> ColdMatch | None:
        """The longest stored prefix of `tokens` that can be restored, from the index alone.

        Its first `held` tokens are in RAM and need not be read.
        """
        ...

    def covers(self, tokens: Tokens, namespace: str, is_usable: bool) -> bool:
        """Whether it has all of `tokens`, and can restore exactly those if that is asked for."""
        ...

    def restore(self, match: ColdMatch) -> Restored:
        """Read and evaluate, maybe in another thread. Raises if what is stored is unusable."""
        ...

    def store(self, write: ColdWrite) -> None:
        """Take a write and return at once. If it is not taken it raises and `done` is not called.

        `ColdStoreBusy` asks to try again later, `ColdStoreRefused` never to; neither is a failure.
        """
        ...

    def delete(self, match: ColdMatch) -> None:
        """Forget a sequence that turned out to be unusable."""
        ...

    def flush(self, timeout: float) -> Flushed:
        """Wait until all that was taken is stored or has failed, at most `timeout` seconds."""
        ...

    def statistics(self) -> ColdStatistics:
        """Sizes and counts, for people."""
        ...


@runtime_checkable
class OwnedSpill(Protocol):
    """Gets a clone of everything that is evicted, and disposes of it, in the cache's thread.

    While it is called it may read the cache and release leases, but nothing else.
    """

    def spill_owned(self, lease: Lease, namespace: str) -> None:
        """Take `lease`; release it on success and on failure. Raising means it was not taken."""
        ...


@runtime_checkable
class SyncSpill(Protocol):
    """Sees everything that is evicted while it is still there; may read the cache meanwhile."""

    def spill_sync(self, tokens: Tokens, caches: Sequence[Any], namespace: str) -> None:
        """Use the live entry and be done with it on return."""
        ...


Spill = OwnedSpill | SyncSpill
