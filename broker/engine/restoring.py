"""Rows that wait for the cold tier: it is read in a thread of its own, once for all of them."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ..cache.restores import Restoration
from .row import Row

Post = Callable[[Callable[[], None]], None]
"""Runs something in the engine's thread, later; called from any thread."""


class Restoring:
    """Readings under way, and who waits for each. Without `post` a reading ends before `begin`."""

    def __init__(
        self, on_done: Callable[[Restoration, Sequence[Row]], None], post: Post | None
    ) -> None:
        self._on_done = on_done
        self._post = post
        self._rows: dict[Restoration, list[Row]] = {}
        self._readers = ThreadPoolExecutor(1, "mlx-swarm-restore") if post is not None else None

    def begin(self, restoration: Restoration, row: Row) -> None:
        """Let a row wait for a reading, which starts unless it is under way."""
        waiting = self._rows.setdefault(restoration, [])
        waiting.append(row)
        if len(waiting) > 1:
            return
        if self._readers is None or self._post is None:
            restoration.run()
            self._done(restoration)
            return
        post = self._post

        def tell(_: Future[None]) -> None:
            post(lambda: self._done(restoration))

        self._readers.submit(restoration.run).add_done_callback(tell)

    def close(self) -> None:
        """Wait for the reading under way; nobody hears of it."""
        if self._readers is not None:
            self._readers.shutdown(wait=True, cancel_futures=True)
        self._rows = {}

    def _done(self, restoration: Restoration) -> None:
        rows = self._rows.pop(restoration, None)
        if rows is not None:
            self._on_done(restoration, rows)
