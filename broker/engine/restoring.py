"""Rows that wait for the cold tier, which is read in a thread of its own.

One sequence is read at a time: who comes meanwhile and wants something from there may find in
memory then what it wanted, or most of it.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress

from ..cache.restores import Restoration
from ..errors import BrokerClosed
from ..threads import Threads
from .row import Row

Post = Callable[[Callable[[], None]], None]
"""Runs something in the engine's thread, later; called from any thread."""

Done = Callable[[Restoration, Row, Sequence[Row]], None]
"""Hears what was read, for which row, and who came meanwhile."""


class Restoring:
    """The reading under way, and who waits. Without `post` a reading ends before `begin` does."""

    def __init__(self, on_done: Done, post: Post | None) -> None:
        self._on_done = on_done
        self._post = post
        self._current: tuple[Restoration, Row] | None = None
        self._later: list[Row] = []
        self._readers = Threads(1, "mlx-swarm-wait") if post is not None else None

    @property
    def is_busy(self) -> bool:
        """Whether something is being read."""
        return self._current is not None

    def begin(self, restoration: Restoration, row: Row) -> None:
        """Start a reading for a row; nothing else may be under way."""
        assert self._current is None
        self._current = restoration, row
        if self._readers is None or self._post is None:
            restoration.run()
            self._done()
            return
        post = self._post

        def tell(_: Future[None]) -> None:
            # A reading that hung may end after the engine.
            with suppress(BrokerClosed):
                post(self._done)

        self._readers.submit(restoration.run).add_done_callback(tell)

    def wait(self, row: Row) -> None:
        """Let a row wait until the reading under way has ended."""
        self._later.append(row)

    def close(self, timeout: float) -> None:
        """Wait for the reading under way, at most `timeout` seconds; nobody hears of it."""
        if self._readers is not None:
            self._readers.close(timeout)
        self._current, self._later = None, []

    def _done(self) -> None:
        if self._current is None:
            return
        (restoration, row), later = self._current, self._later
        self._current, self._later = None, []
        self._on_done(restoration, row, later)
