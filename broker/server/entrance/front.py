"""What stands before all else: names of requests, errors nobody foresaw, the server's end."""

from contextlib import nullcontext

import anyio
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import ApiError, api_error
from ..http import frame
from ..reporting import report
from .draining import Draining, draining_error
from .refusals import error_body, is_anthropic, new_request_id, refusal

READING = ("GET", "HEAD", "OPTIONS")
"""Methods that start nothing. They are answered until the end, and nobody waits for them."""

EVENTS = "text/event-stream"
LAST_SECONDS = 1.0
"""So long a client that does not read keeps the last event of its stream waiting."""

GOING_AWAY = 1001
INTERNAL_ERROR = 1011


class Front:
    """The outermost ASGI application: names each request in `x-request-id`, reports every error.

    What is logged of an error nobody foresaw is its type and where it was raised: its message may
    quote what a user wrote.
    """

    def __init__(self, app: ASGIApp, draining: Draining) -> None:
        self._app = app
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, whatever becomes of it."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        request_id = new_request_id()
        scope.setdefault("state", {})["request_id"] = request_id
        client = _Client(send, request_id)
        error: ApiError | None = None
        with self._draining.connected() as connected:
            try:
                await self._app(scope, receive, client.send)
            except Exception as raised:
                error = api_error(raised)
                report(f"{request_id}: {scope['path']!r}", raised)
        if connected.cancelled_caught:
            await client.end_stream(scope, draining_error())
            await client.end(scope, receive, draining_error(), GOING_AWAY)
        elif error is not None:
            await client.end(scope, receive, error, INTERNAL_ERROR)


class Gate:
    """An ASGI application in front of another one: once the server drains, no new work passes."""

    def __init__(self, app: ASGIApp, draining: Draining) -> None:
        self._app = app
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and count it, or refuse it."""
        is_work = scope["type"] == "http" and scope["method"] not in READING
        if self._draining.started and (is_work or scope["type"] == "websocket"):
            request_id = scope.get("state", {}).get("request_id", "")
            answer = refusal(scope["path"], draining_error(), request_id, {"connection": "close"})
            await answer(scope, receive, send)
            return
        with self._draining.work() if is_work else nullcontext():
            await self._app(scope, receive, send)


class _Client:
    """Who gets the messages of one request, and how far that has come."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self._is_answered = False
        self._is_over = False
        self._is_stream = False

    async def send(self, message: Message) -> None:
        """Pass a message on; the first of an answer bears the request's name."""
        kind = message["type"]
        if kind in ("http.response.start", "websocket.http.response.start", "websocket.accept"):
            self._is_answered = True
            message.setdefault("headers", [])
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self._request_id
            self._is_stream = headers.get("content-type", "").startswith(EVENTS)
        is_last = kind == "http.response.body" and not message.get("more_body", False)
        self._is_over = self._is_over or is_last or kind == "websocket.close"
        await self._send(message)

    async def end_stream(self, scope: Scope, error: ApiError) -> None:
        """End server-sent events that were cut between two of them with an error as the last."""
        if not self._is_stream or self._is_over:
            return
        path = scope["path"]
        body = error_body(path, error, self._request_id)
        last = frame(body, "error" if is_anthropic(path) else None)
        with anyio.move_on_after(LAST_SECONDS):
            await self.send({"type": "http.response.body", "body": last, "more_body": False})

    async def end(self, scope: Scope, receive: Receive, error: ApiError, code: int) -> None:
        """End a request that nobody answers any more. What has begun as HTTP is cut short."""
        if not self._is_answered:
            answer = refusal(scope["path"], error, self._request_id, {"connection": "close"})
            await answer(scope, receive, self.send)
        elif scope["type"] == "websocket" and not self._is_over:
            await self.send(
                {"type": "websocket.close", "code": code, "reason": error.message[:120]}
            )
