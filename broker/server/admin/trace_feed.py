"""`GET /v1/trace`: what happened lately, and what happens, as far as it is the caller's."""

from collections.abc import AsyncIterator
from itertools import islice
from typing import Literal, NamedTuple

import anyio
from anyio import to_thread
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ...trace.events import Event, TraceEvent, encode
from ...trace.recorder import Recorder
from ..http import EventStream
from ..openapi import Operation
from ..service import Service
from .queries import as_whole, choice, seconds, whole
from .visibility import Sight, seen_by

DEFAULT_LIMIT = 10_000
MAX_LIMIT = 65_536
POLL_SECONDS = 0.1
BATCH = 512
"""Events that are looked through at once while others have to wait."""


class TraceQuery(Struct, frozen=True, kw_only=True):
    """From which number or time on (in seconds on the trace's clock) and how many; with `follow`
    what happens from now on too, as server-sent events.
    """

    since: int | None = None
    since_time: float | None = None
    limit: int = DEFAULT_LIMIT
    follow: Literal["0", "1", "false", "true"] = "0"
    format: Literal["json", "jsonl"] = "json"


class TraceAnswer(Struct, frozen=True, kw_only=True):
    """Events, the number to ask for next, and how many that were asked for are gone."""

    next: int
    dropped: int
    events: tuple[TraceEvent, ...]


OPERATIONS = (
    Operation(
        "GET",
        "/v1/trace",
        "What happened lately, as JSON lines, JSON, or events as they come",
        query=TraceQuery,
        response=TraceAnswer,
        events=TraceEvent,
        lines=TraceEvent,
    ),
)


class Query(NamedTuple):
    """What was asked for: events from a number on, or from a time on the recorder's clock."""

    since: int | None
    time: float
    limit: int
    follow: bool
    as_json: bool


class Feed:
    """The events that one caller sees, each with the number to ask for next."""

    def __init__(self, recorder: Recorder, sight: Sight, query: Query) -> None:
        self._recorder = recorder
        self._sight = sight
        self._since = query.since or 0
        self._time = query.time
        self._expects_all = query.since is not None
        self.next = 0
        self.dropped = 0

    def read(self, most: int | None = None) -> list[tuple[int, Event]]:
        """What is new, looking through so many events at most."""
        tail = self._recorder.since(self.next, most)
        if self._expects_all or self.next:
            self.dropped += max(tail.number - max(self.next, self._since), 0)
        self.next = tail.next
        seen = ((at, self._sight.see(each)) for at, each in enumerate(tail.events, tail.number))
        return [
            (at + 1, event)
            for at, event in seen
            if event is not None and at >= self._since and event.time >= self._time
        ]

    def take_dropped(self) -> int:
        """How many are gone that were not told of yet."""
        dropped, self.dropped = self.dropped, 0
        return dropped


def routes(service: Service) -> list[BaseRoute]:
    """`GET /v1/trace`."""

    async def trace(request: Request) -> Response:
        query = _query(request)
        feed = _feed(service, request, query)
        if query.follow:
            return EventStream(_live(feed), ping_seconds=service.settings.ping_seconds)
        return await to_thread.run_sync(_answer, service.broker.recorder, feed, query)

    return [Route("/v1/trace", trace, methods=["GET"])]


def _feed(service: Service, request: Request, query: Query) -> Feed:
    tenant = seen_by(request, service)
    owned = service.broker.cache_view.owned(tenant or "")
    recorder = service.broker.recorder
    if query.follow and query.since is None:
        query = query._replace(since=max(recorder.statistics().emitted - query.limit, 0))
    return Feed(recorder, Sight(tenant, owned), query)


def _answer(recorder: Recorder, feed: Feed, query: Query) -> Response:
    """The latest events, oldest first: JSON lines like a trace file's, or one JSON object."""
    found = feed.read()
    latest = list(islice(found, max(len(found) - query.limit, 0), None))
    if query.since is not None:
        latest = found[: query.limit]
    after = latest[-1][0] if latest and len(latest) < len(found) else feed.next
    lines = [encode(recorder.started), *(encode(event) for _, event in latest)]
    if query.as_json:
        head = b'{"next":%d,"dropped":%d,"events":[' % (after, feed.dropped)
        return Response(head + b",".join(lines) + b"]}", media_type="application/json")
    headers = {"x-trace-next": str(after), "x-trace-dropped": str(feed.dropped)}
    return Response(b"\n".join([*lines, b""]), headers=headers, media_type="application/x-ndjson")


async def _live(feed: Feed) -> AsyncIterator[bytes]:
    """Server-sent events, first what is there; what a slow client missed is counted."""
    while True:
        before = feed.next
        found = feed.read(BATCH)
        if dropped := feed.take_dropped():
            yield b'event: dropped\ndata: {"count":%d}\n\n' % dropped
        for number, event in found:
            yield b"id: %d\ndata: %s\n\n" % (number, encode(event))
        await anyio.sleep(0 if feed.next - before == BATCH else POLL_SECONDS)


def _query(request: Request) -> Query:
    follow = choice(request, "follow", "0", ("0", "1", "false", "true")) in ("1", "true")
    since = request.query_params.get("since")
    if since is None and follow:
        since = request.headers.get("last-event-id")
    return Query(
        since=None if since is None else as_whole("since", since, 0, 1 << 62),
        time=seconds(request, "since_time", float("-inf")),
        limit=whole(request, "limit", DEFAULT_LIMIT, 1, MAX_LIMIT),
        follow=follow,
        as_json=choice(request, "format", "json", ("json", "jsonl")) == "json",
    )
