"""Writing behind: a queue bounded in bytes, and one thread that empties it. No MLX.

What is queued is done with exactly once: stored, failed, or given up when the writer closes.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ...errors import CacheError, ColdStoreBusy
from ..cold import ColdWrite, Flushed
from .pieces import Pieces

_log = logging.getLogger(__name__)


class Job(NamedTuple):
    """A write and what it holds; `release` lets go of the files it hangs on."""

    write: ColdWrite
    pieces: Pieces
    release: Callable[[], None]


class Writer:
    """Calls `perform(job)` for one job after the other, `idle()` when there are none, and `last()`
    when it closes, all in its thread.

    `perform` raises what went wrong, which is passed on to the job's `done`.
    """

    def __init__(
        self,
        max_bytes: int,
        perform: Callable[[Job], None],
        idle: Callable[[], None],
        last: Callable[[], None],
    ) -> None:
        self.max_bytes = max_bytes
        self.pending_writes = 0
        self.pending_bytes = 0
        self._perform = perform
        self._idle = idle
        self._last = last
        self._queue: deque[Job] = deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="mlx-swarm-write", daemon=True)
        self._thread.start()

    def require_room(self, size: int) -> None:
        """Raise `ColdStoreBusy` unless so many bytes more may be queued. One write always may."""
        with self._changed:
            if self._is_closing:
                raise ColdStoreBusy("the cold store is closed")
            if self.pending_writes and self.pending_bytes + size > self.max_bytes:
                raise ColdStoreBusy(
                    f"{self.pending_bytes:,} bytes are being written, {size:,} more do not fit "
                    f"{self.max_bytes:,}"
                )

    def add(self, job: Job) -> None:
        """Queue a job for which there is room."""
        with self._changed:
            self._queue.append(job)
            self.pending_writes += 1
            self.pending_bytes += job.write.bytes
            self._changed.notify_all()

    def flush(self, timeout: float) -> Flushed:
        """Wait until every write has ended, at most `timeout` seconds; what is left."""
        with self._changed:
            self._changed.wait_for(lambda: not self.pending_writes, timeout)
            return Flushed(self.pending_writes, self.pending_bytes)

    def close(self, timeout: float, last_timeout: float) -> Flushed:
        """Take nothing more, finish what can be within `timeout` seconds, give up the rest.

        What is under way by then, and `last`, get `last_timeout` seconds more; returns what was
        not written.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self.pending_writes, timeout)
            given_up, self._queue = self._queue, deque()
        for job in given_up:
            self._end(job, CacheError("the cold store was closed before this was written"))
        self._thread.join(last_timeout)
        return Flushed(
            len(given_up) + self.pending_writes,
            sum(job.write.bytes for job in given_up) + self.pending_bytes,
        )

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._perform(job)
            except Exception as error:
                self._end(job, error)
            else:
                self._end(job, None)
            # What it holds is let go before the next one comes.
            del job
        self._guarded(self._last)

    def _next(self) -> Job | None:
        """The next job, once there is one; None when the writer closes."""
        with self._changed:
            is_idle = not self._queue and not self._is_closing
        if is_idle:
            self._guarded(self._idle)
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closing)
            return self._queue.popleft() if self._queue else None

    def _guarded(self, tidy: Callable[[], None]) -> None:
        try:
            tidy()
        except Exception:
            _log.exception("the cold store failed to tidy up")

    def _end(self, job: Job, outcome: Exception | None) -> None:
        try:
            job.release()
            job.write.done(outcome)
        finally:
            with self._changed:
                self.pending_writes -= 1
                self.pending_bytes -= job.write.bytes
                self._changed.notify_all()
