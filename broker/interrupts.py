"""Signals that end a command: the first ends it in order, a further one at once."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOPPING = "stopping"
STANDARD_ERROR = 2
SAME_SECONDS = 0.3
"""A terminal and what it runs under both pass a Ctrl-C on: so shortly after, it is the same one."""

SHOW_CURSOR = b"\x1b[?25h"


class Interrupts:
    """SIGINT, SIGTERM and SIGHUP of this process, from `install` to its end.

    The first that comes raises `KeyboardInterrupt` in the main thread or, inside `ended_by`, calls
    what is named there. One that comes later ends the process at once, with the exit code of the
    first, which is in `received`. `notice` is what the user is told at the first.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.notice = STOPPING
        self._since = 0.0
        self._end: Callable[[], object] = _raise
        self._numbers: list[int] = []

    def install(self) -> None:
        """Take over those signals that nobody handles or ignores yet."""
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            untouched = (signal.SIG_DFL, signal.default_int_handler)
            if number is not None and signal.getsignal(number) in untouched:
                signal.signal(number, self._handle)
                self._numbers.append(number)

    def finish(self) -> None:
        """To be called last: a process that was interrupted ignores signals while it exits.

        The interpreter puts back the deadly default for handlers in Python, but not for this.
        """
        if self.received is not None:
            for number in self._numbers:
                signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def ended_by(self, end: Callable[[], object]) -> Iterator[None]:
        """Within, the first signal calls `end`, between any two instructions of the main thread."""
        self._end = end
        try:
            yield
        finally:
            self._end = _raise

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if time.monotonic() - self._since > SAME_SECONDS:
                _leave(128 + self.received)
            return
        self.received, self._since = number, time.monotonic()
        _say(f"mlx-swarm: {self.notice} (a second Ctrl-C ends it at once)\n".encode())
        self._end()


def _leave(code: int) -> None:
    """End the process without any more ado, but for the cursor, which a display may have hidden."""
    if os.isatty(STANDARD_ERROR):
        _say(SHOW_CURSOR)
    os._exit(code)


def _say(text: bytes) -> None:
    """Not through sys.stderr, which may be in the middle of writing."""
    with suppress(OSError):
        os.write(STANDARD_ERROR, text)


def _raise() -> None:
    raise KeyboardInterrupt


INTERRUPTS = Interrupts()
