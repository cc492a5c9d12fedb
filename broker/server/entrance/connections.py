"""Connections below the application: how many, and for how long they may be of no use.

uvicorn with h11 waits for the rest of a request for ever, and for a client that does not read. Its
WebSocket implementation is here that of `websockets-sansio`, which holds `send` up while a client
does not read; `websockets` is built on an interface that the package of that name has given up.
"""

import asyncio
import logging
import sys
import time
from typing import Any, NamedTuple

import anyio
import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from ..bodies import encode
from ..errors import RETRY_SECONDS, ApiError
from ..settings import ServerSettings
from .corked import CorkedProtocol
from .refusals import error_body, refusal

SPARE_CONNECTIONS = 64
"""So many more are told that they are too many; further ones are cut without a word."""

MOST_HEADER_BYTES = 64 << 10
MOST_WATCH_SECONDS = 1.0

STRANGERS_FAULTS = frozenset(
    (
        "Invalid HTTP request received.",
        "Unsupported upgrade request.",
        "Invalid UTF-8 sequence received from client.",
        # A WebSocket that is refused with a body, which its protocol takes for none.
        "ASGI callable returned without completing handshake.",
    )
)
"""What uvicorn logs of clients, who are told it: a log is no place that strangers can fill."""

CLOSING_SECONDS = 15.0
"""A WebSocket whose client does not read is closed by its application first, with a reason. So much
longer the close may wait for that client to read again: more than uvicorn has it wait itself."""


class Config(uvicorn.Config):
    """uvicorn's configuration for an application and its settings."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, **more: Any) -> None:
        self.settings = settings
        given = {
            "http": HttpProtocol,
            "ws": CorkedProtocol,
            "ws_per_message_deflate": False,
            "ws_max_size": settings.max_body,
            "loop": "asyncio",
            "lifespan": "off",
            "log_config": None,
            # It would show what stands behind a question mark.
            "access_log": False,
            "server_header": False,
            "proxy_headers": False,
            "h11_max_incomplete_event_size": MOST_HEADER_BYTES,
            "host": settings.host,
            "port": settings.port,
            "ssl_certfile": settings.ssl_certfile,
            "ssl_keyfile": settings.ssl_keyfile,
        }
        super().__init__(app, **{**given, **more})
        logging.getLogger("uvicorn.error").addFilter(_is_no_strangers_fault)


class HttpProtocol(H11Protocol):
    """HTTP/1.1 that refuses in JSON what uvicorn refuses in text."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._most = config.settings.max_connections
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or refuse it: it will be told with the answer to its request."""
        super().connection_made(transport)
        if len(self.connections) > self._most + SPARE_CONNECTIONS:
            transport.abort()
        elif len(self.connections) > self._most:
            self._is_refused = True
            self.app = _busy(self._most)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer of a connection that was idle, however it ended."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP; called while h11's error is handled."""
        error = sys.exception()
        status = getattr(error, "error_status_hint", 400)
        self.refuse(ApiError(status, f"{msg} {error}".strip()))

    def refuse(self, error: ApiError) -> None:
        """Answer in place of the application, which hears that the client has gone."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            path = self.scope["path"] if self.scope is not None else ""
            self._write_whole(error.status, encode(error_body(path, error)))
        self._leave()

    def leave(self) -> None:
        """Close the connection without an answer."""
        self._leave()

    def _write_whole(self, status: int, body: bytes) -> None:
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        events = (
            h11.Response(status_code=status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        for event in events:
            self.transport.write(self.conn.send(event) or b"")

    def _leave(self) -> None:
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _should_upgrade(self) -> bool:
        return not self._is_refused and super()._should_upgrade()


class Watchdog:
    """Ends connections that hold a place and do nothing with it.

    Those whose headers are not complete after `header_seconds`, or their body after `body_seconds`;
    and those that have taken nothing of what waits for them for `stall_seconds`; WebSockets have
    `CLOSING_SECONDS` more.
    """

    def __init__(self, state: ServerState, settings: ServerSettings) -> None:
        self._state = state
        self._settings = settings
        self._seen: dict[object, _Seen] = {}
        shortest = min(settings.header_seconds, settings.body_seconds, settings.stall_seconds)
        self._interval = min(MOST_WATCH_SECONDS, shortest / 4)

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await anyio.sleep(self._interval)
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Look at every connection once."""
        before, self._seen = self._seen, {}
        for each in list(self._state.connections):
            self._seen[each] = seen = _see(each, now, before.get(each))
            if now - seen.stalled_since > self._patience(each):
                each.transport.abort()
            elif isinstance(each, HttpProtocol):
                self._hurry(each, seen, now - seen.reading_since)

    def _patience(self, connection: object) -> float:
        grace = 0.0 if isinstance(connection, HttpProtocol) else CLOSING_SECONDS
        return self._settings.stall_seconds + grace

    def _hurry(self, connection: HttpProtocol, seen: "_Seen", seconds: float) -> None:
        if connection.transport.is_closing():
            return
        settings = self._settings
        if seen.phase is h11.IDLE and seconds > settings.header_seconds:
            if connection.conn.trailing_data[0]:
                connection.refuse(_too_slow("headers", settings.header_seconds))
            else:
                connection.leave()
        elif seen.phase is h11.SEND_BODY and seconds > settings.body_seconds:
            connection.refuse(_too_slow("body", settings.body_seconds))


class _Seen(NamedTuple):
    """What a connection was at when it was looked at: which part of which request it sends."""

    phase: object
    request: object
    reading_since: float
    waiting_bytes: int
    stalled_since: float


def _see(connection: Any, now: float, before: _Seen | None) -> _Seen:
    phase = request = None
    if isinstance(connection, HttpProtocol):
        phase, request = connection.conn.their_state, connection.cycle
    waiting = connection.transport.get_write_buffer_size()
    if before is None:
        return _Seen(phase, request, now, waiting, now)
    same = before.phase is phase and before.request is request
    stalled = waiting and waiting >= before.waiting_bytes > 0
    return _Seen(
        phase,
        request,
        before.reading_since if same else now,
        waiting,
        before.stalled_since if stalled else now,
    )


def _is_no_strangers_fault(record: logging.LogRecord) -> bool:
    return record.msg not in STRANGERS_FAULTS


def _too_slow(part: str, seconds: float) -> ApiError:
    return ApiError(408, f"the {part} of a request must be complete within {seconds:g} s")


def _busy(most: int) -> ASGIApp:
    async def busy(scope: Scope, receive: Receive, send: Send) -> None:
        error = ApiError(
            503,
            f"the server has {most} connections open, which is as many as it takes",
            type="server_error",
            code="overloaded",
            retry_after=RETRY_SECONDS,
        )
        await refusal(scope["path"], error, headers={"connection": "close"})(scope, receive, send)

    return busy
