"""The last events of a response, for those who come late or come back."""

from collections import deque
from collections.abc import AsyncGenerator

import anyio

from ..errors import invalid
from .events import ResponseEvent


class EventRing:
    """The last `max_events` events of one response. `push` and `close` are its run's."""

    def __init__(self, max_events: int) -> None:
        self._events: deque[ResponseEvent] = deque(maxlen=max_events)
        self._next = 0
        self._is_closed = False
        self._changed = anyio.Event()

    @property
    def first(self) -> int:
        """The sequence number of the oldest event that is still here."""
        return self._next - len(self._events)

    @property
    def is_closed(self) -> bool:
        """Whether nothing follows."""
        return self._is_closed

    def push(self, event: ResponseEvent) -> None:
        """Add the next event; the oldest one may go."""
        assert not self._is_closed
        assert event.sequence_number == self._next
        self._events.append(event)
        self._next += 1
        self._wake()

    def close(self) -> None:
        """Nothing follows. Closing twice is harmless."""
        self._is_closed = True
        self._wake()

    def check(self, starting_after: int = -1) -> None:
        """Raise `ApiError` if an event after `starting_after` is gone."""
        if starting_after + 1 < self.first:
            raise invalid(
                f"the events up to {self.first - 1} of this response are gone; "
                f"starting_after is {starting_after}",
                "starting_after",
            )

    async def wait_closed(self) -> None:
        """Until nothing follows."""
        while not self._is_closed:
            await self._changed.wait()

    async def follow(self, starting_after: int = -1) -> AsyncGenerator[ResponseEvent, None]:
        """The events after that number, those to come included.

        Raises `ApiError` if one of them is gone, also when a reader falls behind.
        """
        at = starting_after + 1
        while True:
            self.check(at - 1)
            if at < self._next:
                yield self._events[at - self.first]
                at += 1
            elif self._is_closed:
                return
            else:
                await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
