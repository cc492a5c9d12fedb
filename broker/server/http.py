"""Answering over HTTP: one JSON body, or server-sent events, until the client goes away."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import anyio
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from .bodies import encode, respond
from .errors import ApiError

Result = TypeVar("Result")
ErrorBody = Callable[[ApiError], object]

PING = b": ping\n\n"
CLIENT_CLOSED_REQUEST = 499


class Gone(Exception):
    """The client went away before there was an answer."""


async def unless_gone(request: Request, work: Callable[[], Awaitable[Result]]) -> Result:
    """What `work` returns; cancelled, and `Gone` raised, once the client disconnects.

    The body must have been read.
    """
    results: list[Result] = []
    try:
        async with anyio.create_task_group() as tasks:

            async def watch() -> None:
                while (await request.receive())["type"] != "http.disconnect":
                    pass
                tasks.cancel_scope.cancel()

            tasks.start_soon(watch)
            results.append(await work())
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        if len(group.exceptions) == 1:
            raise group.exceptions[0] from None
        raise
    if not results:
        raise Gone
    return results[0]


def frame(event: object, name: str | None = None) -> bytes:
    """One server-sent event of a JSON body."""
    head = b"event: %s\n" % name.encode() if name else b""
    return b"%sdata: %s\n\n" % (head, encode(event))


class EventStream(StreamingResponse):
    """Server-sent events, pinged while nothing happens. Closing the connection cancels `frames`."""

    def __init__(
        self, frames: AsyncIterator[bytes], *, ping_seconds: float, ping: bytes = PING
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(
            pinged(frames, ping_seconds, ping), headers=headers, media_type="text/event-stream"
        )


async def pinged(frames: AsyncIterator[bytes], seconds: float, ping: bytes) -> AsyncIterator[bytes]:
    """The frames, and a ping whenever none has come for so many seconds."""
    send, receive = anyio.create_memory_object_stream[bytes](0)

    async def pump() -> None:
        with send:
            async for each in frames:
                await send.send(each)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pump)
        with receive:
            while True:
                each: bytes | None = ping
                with anyio.move_on_after(seconds):
                    try:
                        each = await receive.receive()
                    except anyio.EndOfStream:
                        break
                yield each or ping


def refuse(error: ApiError, body: ErrorBody) -> Response:
    """An error as the API writes it."""
    return respond(body(error), error.status, error.headers())
