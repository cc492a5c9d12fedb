"""The seam to the tier below RAM: what the cache asks of a store, and of sinks for evictions."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from msgspec import Struct

from .plan import Lease
from .prefix_hash import Tokens


class ColdMatch(Struct, frozen=True, kw_only=True):
    """The longest stored sequence that serves a prompt: its name there, tokens, bytes to read."""

    name: str
    length: int
    bytes: int


class Restored(NamedTuple):
    """What was read: stock mlx-lm cache objects at the match's length, evaluated.

    `release` is called once, when neither the entry made of it nor a clone of that is left.
    """

    caches: Sequence[Any]
    release: Callable[[], None] | None = None


class ColdWrite(NamedTuple):
    """Something to store: clones at offset len(tokens); [start, len(tokens)) is not stored yet.

    The store owns the clones until it calls `done`, exactly once and from any thread, with None
    when the sequence would survive a crash, or with what went wrong.
    """

    namespace: str
    tokens: Tokens
    start: int
    bytes: int
    lease: Lease
    done: Callable[[Exception | None], None]


class ColdStore(Protocol):
    """A place for sequences that outlives RAM. `find` must be cheap: it runs for every plan."""

    def find(self, tokens: Tokens, namespace: str) -> ColdMatch | None:
        """The longest stored prefix of `tokens` that can be restored, from the index alone."""
        ...

    def restore(self, match: ColdMatch) -> Restored:
        """Read and evaluate, maybe in another thread. Raises if what is stored is unusable."""
        ...

    def store(self, write: ColdWrite) -> None:
        """Take a write and return at once. Raises if it is not taken; `done` is not called then."""
        ...

    def delete(self, match: ColdMatch) -> None:
        """Forget a sequence that turned out to be unusable."""
        ...

    def statistics(self) -> object:
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
