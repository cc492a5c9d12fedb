"""Signals that end a command: the first ends it in order, and what follows cannot disturb that."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

NOTICE = b"mlx-swarm: stopping after the current step\n"
STANDARD_ERROR = 2


class Interrupts:
    """SIGINT, SIGTERM and SIGHUP of this process, from `install` to its end.

    The first that comes raises `KeyboardInterrupt` in the main thread or, inside `ended_by`, calls
    what is named there. All further ones are ignored. `received` is the first one's number.
    """

    def __init__(self) -> None:
        self.received: int | None = None
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
            return
        self.received = number
        with suppress(OSError):
            # Not through sys.stderr, which may be in the middle of writing.
            os.write(STANDARD_ERROR, NOTICE)
        self._end()


def _raise() -> None:
    raise KeyboardInterrupt


INTERRUPTS = Interrupts()
