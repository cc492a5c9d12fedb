"""How results leave the engine thread without waiting for the event loop. No MLX.

Everything the engine has for the loop is put into a mailbox, and one crossing a step wakes all
readers. A reader that does not read gets one delta in the end: deltas are merged.

No operation of a mailbox takes a lock. Its list is appended to by the engine thread and taken from
by the loop's thread, each in single calls of the list; whether to sleep is decided in the loop's
thread, where the crossing wakes too, so no wake-up falls between the two.
"""

from collections.abc import Callable
from threading import RLock
from typing import Generic, Protocol, TypeVar

import anyio
import anyio.lowlevel

from ..errors import BrokerClosed
from ..request import Completed, Delta, StreamEvent

Result = TypeVar("Result")


class LoopGone(Exception):
    """The event loop that readers live in has ended."""


class Reader(Protocol):
    """Something in the event loop that waits for the engine."""

    def wake(self) -> None:
        """Look again; called in the event loop."""


class Courier:
    """Crosses from the engine thread to the event loop it was made in (asyncio or trio).

    The engine never waits here: `anyio.from_thread` would block it until the loop has run.
    """

    def __init__(self) -> None:
        token = anyio.lowlevel.current_token()
        # Asked directly: anyio's own functions look the backend up anew at every call.
        self._current_token = token.backend_class.current_token
        self._create_event = token.backend_class.create_event
        self._loop = token.native_token
        schedule = getattr(self._loop, "call_soon_threadsafe", None)
        self._schedule: Callable[[Callable[[], None]], object] = (
            schedule or self._loop.run_sync_soon  # type: ignore[attr-defined]
        )
        self._lock = RLock()
        self._posted: dict[Reader, None] = {}
        self._crossing: dict[Reader, None] = {}

    def event(self, known: anyio.Event | None) -> anyio.Event:
        """An event to wait for here: `known`, or a new one. Raises `BrokerClosed` in an event loop
        that is never woken from here.
        """
        try:
            here = self._current_token()
        except RuntimeError:  # inside another kind of event loop
            here = None
        if here is not self._loop:
            raise BrokerClosed(
                "the broker was opened in another event loop; open one in each loop that uses it"
            )
        return known or self._create_event()

    def post(self, reader: Reader) -> None:
        """Engine side: have `reader` woken by the next crossing."""
        self._posted[reader] = None

    def flush(self) -> None:
        """Engine side: cross once for everything posted. Raises `LoopGone` if there is nobody to
        cross to.
        """
        if not self._posted:
            return
        posted, self._posted = self._posted, {}
        with self._lock:
            under_way = bool(self._crossing)
            self._crossing.update(posted)
        if under_way:
            return
        try:
            self._schedule(self._deliver)
        except RuntimeError as error:  # trio's RunFinishedError is one as well
            raise LoopGone from error

    def _deliver(self) -> None:
        with self._lock:
            readers, self._crossing = self._crossing, {}
        for reader in readers:
            reader.wake()


class _Waiting:
    """The loop's side of a mailbox: all who sleep here are woken."""

    def __init__(self, courier: Courier) -> None:
        self._courier = courier
        self._awake: anyio.Event | None = None

    def wake(self) -> None:
        """Let all who sleep look again."""
        if self._awake is not None:
            self._awake.set()
            self._awake = None

    def next_wake(self) -> anyio.Event:
        """What the next `wake` sets; to be waited for at once, where nothing has come yet."""
        event = self._awake = self._courier.event(self._awake)
        return event


class Reply(_Waiting, Generic[Result]):
    """The result of one call into the engine thread."""

    def __init__(self, courier: Courier) -> None:
        super().__init__(courier)
        self._value: Result
        self._error: BaseException | None = None
        self._done = False

    def set(self, value: Result) -> None:
        """Engine side: the call returned."""
        self._value = value
        self._finish()

    def fail(self, error: BaseException) -> None:
        """Engine side: the call raised."""
        self._error = error
        self._finish()

    async def wait(self) -> Result:
        """Loop side: the result, or the error raised again."""
        while not self._done:
            await self.next_wake().wait()
        if self._error is not None:
            raise self._error
        return self._value

    def _finish(self) -> None:
        self._done = True
        self._courier.post(self)


class Mailbox(_Waiting):
    """The events of one request, from the engine thread; of several readers each gets a part."""

    def __init__(self, courier: Courier) -> None:
        super().__init__(courier)
        self._news: list[StreamEvent | BaseException] = []
        self.ended = False

    def put(self, event: StreamEvent) -> None:
        """Engine side: add an event. Deltas that nobody has read yet become one."""
        if type(event) is Completed:
            self._finish(event)
        else:
            self._news.append(event)
            self._courier.post(self)

    def fail(self, error: BaseException) -> None:
        """Engine side: the request ends with an error."""
        self._finish(error)

    async def receive(self) -> StreamEvent | None:
        """Loop side: the next event, None after the last; raises what the request failed with."""
        while not self._news:
            # In this order: the end is put before `ended` says so.
            if self.ended and not self._news:
                return None
            await self.next_wake().wait()
        event = self._news.pop(0)
        if isinstance(event, BaseException):
            raise event
        if self._news and type(event) is Delta:
            return self._merged(event)
        return event

    def raise_refusal(self) -> None:
        """Loop side: raise what the request failed with before anything came of it."""
        first = self._news[0] if self._news else None
        if isinstance(first, BaseException):
            raise first

    def _merged(self, first: Delta) -> Delta:
        """One delta of the first one and those that follow it directly."""
        news = list(self._news)
        count = next((at for at, each in enumerate(news) if not isinstance(each, Delta)), len(news))
        if not count:
            return first
        del self._news[:count]
        deltas: list[Delta] = [first, *news[:count]]  # type: ignore[list-item]
        return Delta(
            first.request,
            "".join([delta.text for delta in deltas]),
            tuple([token for delta in deltas for token in delta.tokens]),
            tuple([item for delta in deltas for item in delta.logprobs]),
        )

    def _finish(self, end: Completed | BaseException) -> None:
        if not self.ended:
            self._news.append(end)
            self.ended = True
            self._courier.post(self)
