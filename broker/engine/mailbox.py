"""How results leave the engine thread without waiting for the event loop. No MLX.

Everything the engine has for the loop is put into a mailbox, and one crossing a step wakes all
readers. A reader that does not read costs at most one pending delta: deltas are merged.
"""

from collections.abc import Callable
from threading import RLock
from typing import Generic, Protocol, TypeVar

import anyio
import anyio.lowlevel

from ..errors import BrokerClosed
from ..request import Completed, Delta, RequestId, Started, StreamEvent, TokenLogprob

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
        self._loop = anyio.lowlevel.current_token().native_token
        schedule = getattr(self._loop, "call_soon_threadsafe", None)
        self._schedule: Callable[[Callable[[], None]], object] = (
            schedule or self._loop.run_sync_soon  # type: ignore[attr-defined]
        )
        self._lock = RLock()
        self._posted: dict[Reader, None] = {}
        self._crossing = False

    def check_loop(self) -> None:
        """Raise `BrokerClosed` in an event loop that is never woken from here."""
        if anyio.lowlevel.current_token().native_token is not self._loop:
            raise BrokerClosed(
                "the broker was opened in another event loop; open one in each loop that uses it"
            )

    def post(self, reader: Reader) -> None:
        """Have `reader` woken by the next crossing."""
        with self._lock:
            self._posted[reader] = None

    def flush(self) -> None:
        """Cross once for everything posted. Raises `LoopGone` if there is nobody to cross to."""
        with self._lock:
            if not self._posted or self._crossing:
                return
            self._crossing = True
        try:
            self._schedule(self._deliver)
        except RuntimeError as error:  # trio's RunFinishedError is one as well
            raise LoopGone from error

    def _deliver(self) -> None:
        with self._lock:
            self._crossing = False
            readers, self._posted = self._posted, {}
        for reader in readers:
            reader.wake()


class _Waiting:
    """The loop's side of a mailbox: all who sleep here are woken."""

    def __init__(self, courier: Courier) -> None:
        self._courier = courier
        self._awake: anyio.Event | None = None

    def wake(self) -> None:
        if self._awake is not None:
            self._awake.set()

    async def sleep_until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self._courier.check_loop()
            if self._awake is None or self._awake.is_set():
                self._awake = anyio.Event()
            # What arrived before the event existed woke nobody.
            if ready():
                break
            await self._awake.wait()


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
        await self.sleep_until(lambda: self._done)
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
        self._lock = RLock()
        self._started: Started | None = None
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._end: Completed | BaseException | None = None
        self.ended = False

    def put(self, event: StreamEvent) -> None:
        """Engine side: add an event. Deltas that nobody has read yet become one."""
        with self._lock:
            match event:
                case Started():
                    self._started = event
                case Delta():
                    self._texts.append(event.text)
                    self._tokens.extend(event.tokens)
                    self._logprobs.extend(event.logprobs)
                case Completed():
                    self._finish(event)
        self._courier.post(self)

    def fail(self, error: BaseException) -> None:
        """Engine side: the request ends with an error."""
        with self._lock:
            self._finish(error)
        self._courier.post(self)

    async def receive(self, request: RequestId) -> StreamEvent | None:
        """Loop side: the next event, None after the last; raises what the request failed with."""
        await self.sleep_until(self._has_news)
        with self._lock:
            if self._started is not None:
                started, self._started = self._started, None
                return started
            if self._tokens or self._texts:
                return self._merged(request)
            end, self._end = self._end, None
        if isinstance(end, BaseException):
            raise end
        return end

    def _merged(self, request: RequestId) -> Delta:
        texts, tokens, logprobs = self._texts, self._tokens, self._logprobs
        self._texts, self._tokens, self._logprobs = [], [], []
        return Delta(request, "".join(texts), tuple(tokens), tuple(logprobs))

    def _has_news(self) -> bool:
        with self._lock:
            return bool(self._started or self._texts or self._tokens or self.ended)

    def _finish(self, end: Completed | BaseException) -> None:
        if not self.ended:
            self.ended = True
            self._end = end
