"""Answering over HTTP: one JSON body, or server-sent events, until the client goes away."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from .bodies import encode, respond
from .errors import ApiError

Result = TypeVar("Result")
ErrorBody = Callable[[ApiError], object]

PING = b": ping\n\n"
CLIENT_CLOSED_REQUEST = 499
CLEANUP_SECONDS = 10.0


class Gone(Exception):
    """The client went away before there was an answer."""


async def unless_gone(request: Request, work: Callable[[], Awaitable[Result]]) -> Result:
    """What `work` returns; cancelled, and `Gone` raised, once the client disconnects.

    The body must have been read. What `work` raises comes out as it is.
    """
    results: list[Result] = []
    errors: list[Exception] = []
    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            await disconnected(request.receive)
            tasks.cancel_scope.cancel()

        tasks.start_soon(watch)
        try:
            results.append(await work())
        except Exception as error:
            errors.append(error)
        tasks.cancel_scope.cancel()
    if errors:
        raise errors.pop()
    if not results:
        raise Gone
    return results.pop()


async def disconnected(receive: Receive) -> None:
    """Wait until the client has gone. What it still sends is thrown away."""
    while (await receive())["type"] != "http.disconnect":
        pass


def frame(event: object, name: str | None = None) -> bytes:
    """One server-sent event of a JSON body."""
    head = b"event: %s\n" % name.encode() if name else b""
    return b"%sdata: %s\n\n" % (head, encode(event))


class EventStream(Response):
    """Server-sent events, pinged while nothing happens.

    `frames` is iterated and closed in one task, whatever ends the response: its end, its error, or
    a client that has gone. Nothing is buffered here: a client that reads slowly holds up its own
    `frames` only, and one that does not read at all is cut off by `connections.Watchdog`.
    """

    media_type = "text/event-stream"

    def __init__(
        self, frames: AsyncIterator[bytes], *, ping_seconds: float, ping: bytes = PING
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames
        self._ping = ping
        self._ping_seconds = ping_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything; raises what `frames` raises."""
        errors: list[Exception] = []
        try:
            async with anyio.create_task_group() as tasks:

                async def watch() -> None:
                    await disconnected(receive)
                    tasks.cancel_scope.cancel()

                client = _Client(send)
                tasks.start_soon(watch)
                tasks.start_soon(client.ping, self._ping, self._ping_seconds)
                try:
                    await self._pump(client)
                except Exception as error:
                    errors.append(error)
                tasks.cancel_scope.cancel()
        finally:
            await self._close()
        if errors:
            raise errors.pop()

    async def _pump(self, client: "_Client") -> None:
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await client.send(head)
        async for each in self._frames:
            await client.send({"type": "http.response.body", "body": each, "more_body": True})
        await client.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _close(self) -> None:
        close = getattr(self._frames, "aclose", None)
        if close is not None:
            with anyio.move_on_after(CLEANUP_SECONDS, shield=True):
                await close()


class _Client:
    """Who gets a stream, one message at a time."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._turn = anyio.Lock()
        self._sent_at = anyio.current_time()
        self._is_open = False

    async def send(self, message: Message) -> None:
        """Send a message after those that are on their way."""
        async with self._turn:
            await self._deliver(message)

    async def ping(self, ping: bytes, seconds: float) -> None:
        """Send a ping whenever nothing has been sent for so many seconds."""
        message = {"type": "http.response.body", "body": ping, "more_body": True}
        while True:
            await anyio.sleep_until(self._sent_at + seconds)
            async with self._turn:
                if self._is_open and anyio.current_time() >= self._sent_at + seconds:
                    await self._deliver(message)

    async def _deliver(self, message: Message) -> None:
        with suppress(OSError):  # of servers that raise it: the client has gone, as `watch` hears
            await self._send(message)
        self._sent_at = anyio.current_time()
        self._is_open = bool(message.get("more_body", True))


def refuse(error: ApiError, body: ErrorBody) -> Response:
    """An error as the API writes it."""
    return respond(body(error), error.status, error.headers())
