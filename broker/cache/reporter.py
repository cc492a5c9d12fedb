"""Tells the trace what happens to entries; does nothing, and computes nothing, without one."""

from collections.abc import Callable
from typing import Protocol

from ..trace.events import Event


class Trace(Protocol):
    """Where events go: a `Recorder`."""

    def now(self) -> float: ...
    def emit(self, event: Event) -> None: ...


class Reporter:
    """Makes events only if somebody listens: the names in them cost hashing."""

    def __init__(self, trace: Trace | None) -> None:
        self._trace = trace

    @property
    def is_heard(self) -> bool:
        """Whether somebody listens."""
        return self._trace is not None

    def emit(self, make: Callable[[float], Event]) -> None:
        """Emit `make(now)`."""
        if self._trace is not None:
            self._trace.emit(make(self._trace.now()))
