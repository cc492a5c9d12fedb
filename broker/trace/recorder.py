"""The recorder: the latest events in a ring, all of them in a JSONL file on request. No MLX."""

import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from threading import Condition, Thread
from typing import BinaryIO, NamedTuple, Self

import msgspec
from msgspec import Struct

from ..errors import TraceError
from .events import TRACE_VERSION, Event, TraceEvent, TraceStarted, decode, encode


class RecorderStatistics(Struct, frozen=True, kw_only=True):
    """`dropped` events left the ring; `unwritten` ones never reached the file."""

    emitted: int
    dropped: int
    unwritten: int
    file_error: str


class Tail(NamedTuple):
    """Events of the ring in their order, the first of which has this `number`, counted from 0.

    `dropped` had been asked for, and have left the ring.
    """

    number: int
    events: list[Event]
    dropped: int

    @property
    def next(self) -> int:
        """The number to ask for next."""
        return self.number + len(self.events)


class Recorder:
    """Keeps the last `capacity` events, and writes every event to `path` if one is given.

    The file is JSON lines, readable by its owner only, replaced if it exists, and begins with
    `TraceStarted`. It is written by a thread of its own, so `emit` costs an append whatever the
    disk does; up to `capacity` events wait for the disk. A context manager: closing writes what
    waits. Raises `TraceError` if the file cannot be opened. Nothing after that raises.
    """

    def __init__(
        self,
        capacity: int = 65536,
        path: str | os.PathLike[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        model: str = "",
        backend: str = "",
    ) -> None:
        self._clock = clock
        self._ring: deque[Event] = deque(maxlen=capacity)
        self._waiting: deque[Event] = deque()
        # A Condition's own lock is reentrant: a finaliser that emits may run inside `emit`.
        self._changed = Condition()
        self._emitted = 0
        self._unwritten = 0
        self._file_error = ""
        self._closed = False
        self._writer: Thread | None = None
        self.started = TraceStarted(
            time=clock(), version=TRACE_VERSION, wall_time=time.time(), model=model, backend=backend
        )
        if path is not None:
            file = _open_private(path)
            self._waiting.append(self.started)
            self._writer = Thread(
                target=self._write, args=(file,), name="mlx-swarm-trace", daemon=True
            )
            self._writer.start()

    def now(self) -> float:
        """Seconds on the recorder's clock: the `time` of an event."""
        return self._clock()

    def emit(self, event: Event) -> None:
        """Record an event. Never blocks on the disk and never raises; safe from any thread."""
        with self._changed:
            self._ring.append(event)
            self._emitted += 1
            if self._writer is None:
                return
            if self._closed or self._file_error or len(self._waiting) >= (self._ring.maxlen or 0):
                self._unwritten += 1
                return
            self._waiting.append(event)
            self._changed.notify()

    def note(self, kind: type[Event], **fields: object) -> None:
        """Record an event of a kind that happens now, with these fields."""
        self.emit(kind(time=self._clock(), **fields))

    def events(self) -> list[Event]:
        """`TraceStarted` and the events still in the ring, oldest first."""
        with self._changed:
            return [self.started, *self._ring]

    def since(self, number: int = 0, most: int | None = None) -> Tail:
        """The events from a number on that are still in the ring, `most` of them at most."""
        with self._changed:
            first = self._emitted - len(self._ring)
            start = min(max(number, first), self._emitted)
            stop = None if most is None else start - first + most
            events = list(islice(self._ring, start - first, stop))
        return Tail(start, events, max(first - number, 0))

    def statistics(self) -> RecorderStatistics:
        """Counts since the start."""
        with self._changed:
            return RecorderStatistics(
                emitted=self._emitted,
                dropped=self._emitted - len(self._ring),
                unwritten=self._unwritten,
                file_error=self._file_error,
            )

    def close(self) -> None:
        """Write what waits, close the file, end the thread. The ring can still be read."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._writer is not None:
            self._writer.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _write(self, file: BinaryIO) -> None:
        """The writer thread: whatever waits goes out as one batch and one flush."""
        batch: list[Event] = []
        try:
            with file:
                while batch := self._next_batch():
                    file.write(b"".join(self._lines(batch)))
                    file.flush()
        except OSError as error:
            self._give_up(batch, error)

    def _next_batch(self) -> list[Event]:
        """The events that wait, once there are some; empty when closed and all is written."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            batch = list(self._waiting)
            self._waiting.clear()
            return batch

    def _lines(self, batch: list[Event]) -> Iterator[bytes]:
        """The lines of a batch, without the events that JSON cannot hold."""
        for event in batch:
            try:
                yield encode(event) + b"\n"
            except (TypeError, ValueError, msgspec.MsgspecError):
                with self._changed:
                    self._unwritten += 1

    def _give_up(self, batch: list[Event], error: OSError) -> None:
        with self._changed:
            self._file_error = f"{type(error).__name__}: {error}"
            self._unwritten += len(batch) + len(self._waiting)
            self._waiting.clear()


def read_trace(path: str | os.PathLike[str]) -> list[TraceEvent]:
    """The events of a trace file, `TraceStarted` first.

    A last line without its newline, as a killed process leaves it, is ignored. Raises `TraceError`,
    naming the line, for anything else that is not an event, and for a file of another version.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise TraceError(f"cannot read trace {path}: {error.strerror or error}") from None
    started = _decode_line(path, 1, lines[0]) if lines else None
    if not isinstance(started, TraceStarted):
        raise TraceError(f"{path}, line 1: a trace begins with TraceStarted")
    if started.version != TRACE_VERSION:
        raise TraceError(
            f"{path}, line 1: the trace has version {started.version}; this reads {TRACE_VERSION}"
        )
    rest = (_decode_line(path, number, line) for number, line in enumerate(lines[1:], 2))
    return [started, *rest]


def _decode_line(path: str | os.PathLike[str], number: int, line: bytes) -> TraceEvent:
    try:
        return decode(line)
    except msgspec.MsgspecError as error:
        raise TraceError(f"{path}, line {number}: {error}") from None


def _open_private(path: str | os.PathLike[str]) -> BinaryIO:
    """The file, emptied, for its owner only; devices and pipes keep their mode."""
    try:
        descriptor = os.open(
            os.fspath(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600
        )
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.fchmod(descriptor, 0o600)
        return os.fdopen(descriptor, "wb")
    except (OSError, TypeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"cannot write trace {path!s}: {reason}") from None
