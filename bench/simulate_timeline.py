"""Time for a simulation: a clock that moves when told to, and what is to happen when."""

import heapq
from collections.abc import Callable
from itertools import count


class Timeline:
    """Seconds on a clock that stands still unless somebody lets them pass.

    What is due happens in the order of its time; what is due at the same time in the order in which
    it was planned.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def __call__(self) -> float:
        return self.now

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Plan something."""
        heapq.heappush(self._events, (time, next(self._numbers), action))

    def spend(self, seconds: float) -> None:
        """Let time pass; what becomes due meanwhile happens at the next `catch_up`."""
        self.now += seconds

    def catch_up(self) -> None:
        """Let everything happen that is due."""
        while self._events and self._events[0][0] <= self.now:
            heapq.heappop(self._events)[2]()

    def skip(self, latest: float) -> bool:
        """Pass to the next event, or to `latest` if that is sooner; False if there is neither."""
        until = min(self._events[0][0] if self._events else latest, latest)
        if until == float("inf"):
            return False
        self.now = max(self.now, until)
        return True
