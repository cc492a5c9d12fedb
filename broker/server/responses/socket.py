"""The Responses API over WebSocket: any number of conversations over one connection.

As OpenAI has it: `response.create` starts a response in the lane that its `stream_id` names, or in
the default one; responses of one lane come one after another, those of different lanes together;
every event of a response has its `stream_id`. What is wrong is answered with an `error` event, and
the connection lives on. Beyond that: `response.cancel`, and the events of `own_events`.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Protocol

import anyio
from msgspec.structs import replace
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from ..admin.visibility import Sight, seen_by
from ..bodies import decode
from ..errors import ApiError, api_error, invalid
from ..openapi import Operation
from ..reporting import report
from ..service import Service
from ..settings import ServerSettings
from ..turns.callers import caller
from ..turns.turn import Caller
from .client_events import Cancel, Head, Resume, Subscribe, Unsubscribe, decode_create
from .items import new_id
from .jobs import Replaying, Turn
from .lanes import Lanes
from .outbox import Outbox, Source, Stalled
from .own_events import (
    Mine,
    Replays,
    Subscriptions,
    find_events,
    send_statistics,
    send_trace,
)
from .run import ResponseRun
from .wire import CreateResponse

GOING_AWAY = 1001
TOO_BIG = 1009
TRY_LATER = 1013
CLOSE_SECONDS = 5.0
STORE_SHARE = 16
"""A connection's own responses may have so large a part of `store_bytes`."""

Handler = Callable[[str, str | None], Awaitable[None]]


class Cancellable(Protocol):
    """A turn of a lane, or a run."""

    def cancel(self) -> None:
        """End it soon. Does not wait."""


OPERATIONS: tuple[Operation, ...] = ()
"""A WebSocket has no place in an OpenAPI document."""


def routes(service: Service) -> list[BaseRoute]:
    """The WebSocket at /v1/responses."""
    replays = Replays()

    async def responses(socket: WebSocket) -> None:
        await Connection(socket, service, replays).serve()

    return [WebSocketRoute("/v1/responses", responses)]


def error_event(error: ApiError) -> dict[str, object]:
    """An error as OpenAI writes it over WebSocket."""
    body: dict[str, object] = {
        "type": error.type,
        "code": error.code,
        "message": error.message,
        "param": error.param,
    }
    if headers := error.headers():
        body["headers"] = headers
    return {"type": "error", "status": int(error.status), "error": body}


class Connection:
    """One client. Whatever it started ends with the connection."""

    def __init__(self, socket: WebSocket, service: Service, replays: Replays) -> None:
        settings = service.settings
        self.id = new_id("ws")[:19]
        self.service = service
        self.stores = service.stores.of_connection(settings.store_bytes // STORE_SHARE)
        self.replays = replays
        self.outbox = Outbox(self._send, settings.outbox_bytes, settings.stall_seconds)
        self.runs: dict[str, ResponseRun] = {}
        self._socket = socket
        self._close: tuple[int, str] | None = None
        self._tenant = caller(socket).tenant
        self._mine = Mine(self._tenant)
        self._scope: anyio.CancelScope
        self._lanes: Lanes
        self._subscriptions: Subscriptions
        self._handlers: dict[str, Handler] = {
            "response.create": self._create,
            "response.cancel": self._cancel,
            "broker.subscribe": self._subscribe,
            "broker.unsubscribe": self._unsubscribe,
            "broker.resume": self._resume,
        }

    async def serve(self) -> None:
        """Serve the client until it goes away or the connection is closed."""
        settings = self.service.settings
        await self._socket.accept()
        with self.service.draining.leaving():
            await self._serve(settings)
            if self._close is not None:
                with anyio.move_on_after(CLOSE_SECONDS):
                    await self._closed(*self._close)

    async def _serve(self, settings: ServerSettings) -> None:
        async with anyio.create_task_group() as tasks:
            self._scope = tasks.cancel_scope
            self._lanes = Lanes(tasks, settings.max_lanes, 2 * settings.max_body)
            self._subscriptions = Subscriptions(tasks)
            for each in (self._read, self._write, self._watch, self._leave):
                tasks.start_soon(each)

    async def refuse(self, error: Exception, stream_id: str | None) -> None:
        """Tell the client what is wrong."""
        known = api_error(error)
        if known.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            report("a request over WebSocket", error)
        await self.outbox.say(error_event(known), Source(stream_id))

    def caller(self, body: CreateResponse, stream_id: str | None) -> Caller:
        """For whom a response is computed: a lane is an agent, unless the request names another."""
        found = caller(self._socket, cache_key=body.prompt_cache_key, metadata=body.metadata)
        found = replace(found, agent=found.agent or f"{self.id}/{stream_id or ''}")
        self._mine.add(found.agent)
        return found

    def _end(self, code: int, reason: str) -> None:
        self._close = self._close or (code, reason)
        self._scope.cancel()

    async def _read(self) -> None:
        while (message := await self._socket.receive())["type"] == "websocket.receive":
            text = message.get("text")
            if text is None:
                error = invalid("a message is binary; events are sent as text", "type")
                await self.refuse(error, None)
            elif len(text) > self.service.settings.max_body:
                self._end(TOO_BIG, f"more than {self.service.settings.max_body:,} bytes")
            else:
                await self._take(text)
        self._scope.cancel()

    async def _take(self, text: str) -> None:
        stream_id = None
        try:
            head = decode(Head, text)
            stream_id = head.stream_id
            handler = self._handlers.get(head.type)
            if handler is None:
                raise invalid(f"events of the type {head.type[:80]!r} are not known here", "type")
            await handler(text, stream_id)
        except Exception as error:
            await self.refuse(error, stream_id)

    async def _create(self, text: str, stream_id: str | None) -> None:
        body = decode_create(text)
        job = Turn(self, body, self.caller(body, stream_id), stream_id, len(text))
        self._lanes.put(stream_id, job)

    async def _cancel(self, text: str, stream_id: str | None) -> None:
        id = decode(Cancel, text).response_id
        found: Cancellable | None
        if id is None:
            found = self._lanes.current(stream_id)
        else:
            found = self.runs.get(id) or self.stores.live.find(id, self._tenant)
        if found is None:
            what = (
                "this lane has nothing to do" if id is None else f"'{id[:80]}' is not computed now"
            )
            param = "stream_id" if id is None else "response_id"
            raise invalid(f"nothing to cancel: {what}", param, "response_cancel_not_active")
        found.cancel()

    async def _subscribe(self, text: str, stream_id: str | None) -> None:
        asked = decode(Subscribe, text)
        if "trace" in asked.events:
            seen = seen_by(self._socket, self.service)
            owned = self.service.broker.cache_view.owned(seen or "")
            wanted = self._mine.has if asked.scope == "connection" else lambda event: True
            recorder = self.service.broker.recorder
            sight = Sight(seen, owned)
            tell = partial(send_trace, self.outbox, recorder, sight, wanted)
            self._subscriptions.start("trace", tell)
        if "statistics" in asked.events:
            tell = partial(send_statistics, self.outbox, self.statistics)
            self._subscriptions.start("statistics", tell)
        await self._say_subscribed(stream_id)

    async def _unsubscribe(self, text: str, stream_id: str | None) -> None:
        self._subscriptions.stop(decode(Unsubscribe, text).events)
        await self._say_subscribed(stream_id)

    async def _say_subscribed(self, stream_id: str | None) -> None:
        event = {"type": "broker.subscribed", "events": self._subscriptions.names}
        await self.outbox.say(event, Source(stream_id))

    async def _resume(self, text: str, stream_id: str | None) -> None:
        asked = decode(Resume, text)
        ring = find_events(asked.response_id, self._tenant, self.stores, self.replays)
        job = Replaying(self.outbox, ring, asked.starting_after, stream_id, self.refuse)
        self._lanes.put(("resume", asked.response_id), job)

    def statistics(self) -> dict[str, object]:
        """What goes on in this connection, as an event."""
        return {
            "type": "broker.statistics",
            "lanes": len(self._lanes),
            "running": len(self.runs),
            "queued": self._lanes.queued,
            "waiting_bytes": self.outbox.bytes,
            "sent": self.outbox.sent,
            "merged": self.outbox.merged,
            "dropped": self.outbox.dropped,
        }

    async def _send(self, text: str) -> None:
        await self._socket.send({"type": "websocket.send", "text": text})

    async def _write(self) -> None:
        try:
            await self.outbox.write()
        except (WebSocketDisconnect, RuntimeError):  # uvicorn raises both where the client has gone
            self._scope.cancel()

    async def _watch(self) -> None:
        try:
            await self.outbox.watch()
        except Stalled:
            self._end(
                TRY_LATER, f"{self.outbox.bytes:,} bytes wait, which the client does not take"
            )

    async def _leave(self) -> None:
        draining = self.service.draining
        await draining.wait()
        await self._lanes.wait_idle()
        await self.outbox.drained()
        self._end(GOING_AWAY, "the server is about to end")

    async def _closed(self, code: int, reason: str) -> None:
        try:
            await self._socket.close(code, reason)
        except (WebSocketDisconnect, RuntimeError):
            pass
