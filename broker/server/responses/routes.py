"""The Responses API over HTTP."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Literal, Self

import anyio
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.routing import BaseRoute, Route

from ..bodies import read, respond
from ..errors import ApiError, invalid
from ..http import EventStream, frame, unless_gone
from ..openapi import Operation
from ..service import Service
from ..turns.callers import caller
from .events import ErrorEvent, ResponseEvent, StreamEvent
from .objects import Item, Response
from .ring import EventRing
from .run import ResponseRun, count_tokens, start_run
from .store import Stored, not_found
from .wire import CreateResponse

DEFAULT_ITEMS = 20
MOST_ITEMS = 100


class ItemList(Struct, frozen=True, kw_only=True):
    """Input items of a response, a page of them."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(Struct, frozen=True):
    """A response that is no more."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class TokenCount(Struct, frozen=True):
    """How many tokens the prompt of a request has."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class Retrieving(Struct, frozen=True, kw_only=True):
    """How to ask for a response: with `stream`, for its events after one of them."""

    stream: bool | None = None
    starting_after: int | None = None


class Paging(Struct, frozen=True, kw_only=True):
    """Which items of a list are wanted."""

    limit: int | None = None
    order: Literal["asc", "desc"] | None = None
    after: str | None = None


ALL = "/v1/responses"
ONE = "/v1/responses/{id}"

OPERATIONS = (
    Operation(
        "POST",
        ALL,
        "Compute a response",
        body=CreateResponse,
        response=Response,
        events=StreamEvent,
        errors=(404, 429, 503, 504),
    ),
    Operation(
        "POST",
        f"{ALL}/input_tokens",
        "Count the tokens of a prompt",
        body=CreateResponse,
        response=TokenCount,
        errors=(404,),
    ),
    Operation(
        "GET",
        ONE,
        "A response as it is now, or its events again",
        query=Retrieving,
        response=Response,
        events=StreamEvent,
        errors=(404,),
    ),
    Operation("DELETE", ONE, "Forget a response", response=Deleted, errors=(404,)),
    Operation("POST", f"{ONE}/cancel", "End a response soon", response=Response, errors=(404,)),
    Operation(
        "GET",
        f"{ONE}/input_items",
        "What a response is the answer to",
        query=Paging,
        response=ItemList,
        errors=(404,),
    ),
)


def routes(service: Service) -> list[BaseRoute]:
    """The endpoints below /v1/responses."""
    api = ResponsesApi(service)
    return [
        Route(ALL, api.create, methods=["POST"]),
        Route(f"{ALL}/input_tokens", api.count, methods=["POST"]),
        Route(ONE, api.retrieve, methods=["GET"]),
        Route(ONE, api.delete, methods=["DELETE"]),
        Route(f"{ONE}/cancel", api.cancel, methods=["POST"]),
        Route(f"{ONE}/input_items", api.input_items, methods=["GET"]),
    ]


class RunFrames:
    """The events of a run as server-sent ones. Closing ends the run, though nothing was read."""

    def __init__(self, run: ResponseRun) -> None:
        self._run = run
        self._events = aiter(run)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        event = await anext(self._events)
        return frame(event, event.type)

    async def aclose(self) -> None:
        """End the run if it has not ended."""
        await self._run.aclose()


class ResponsesApi:
    """The endpoints; each raises what is wrong."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._stores = service.stores

    async def create(self, request: Request) -> HttpResponse:
        """Compute a response; a client that goes away cancels it."""
        body = await read(request, CreateResponse)
        who = caller(
            request,
            cache_key=body.prompt_cache_key,
            user=body.user or body.safety_identifier,
            metadata=body.metadata,
        )
        if body.stream:
            run = await unless_gone(
                request, lambda: start_run(self._service, body, who, self._stores)
            )
            return self._stream(RunFrames(run))

        async def whole() -> HttpResponse:
            async with await start_run(self._service, body, who, self._stores) as run:
                return respond(await run.end())

        return await unless_gone(request, whole)

    async def count(self, request: Request) -> HttpResponse:
        """How many tokens a request's prompt has; nothing is computed."""
        body = await read(request, CreateResponse)
        tokens = await count_tokens(self._service, body, caller(request), self._stores)
        return respond(TokenCount(tokens))

    async def retrieve(self, request: Request) -> HttpResponse:
        """A response as it is now, or its events again."""
        id, tenant = _asked(request)
        run = self._stores.live.find(id, tenant)
        if not _flag(request, "stream"):
            return respond(run.response if run else self._stored(id, tenant).response)
        after = _number(request, "starting_after", -1)
        ring = run.ring if run else self._events(id, tenant)
        ring.check(after)
        return self._stream(_followed(ring, after))

    async def cancel(self, request: Request) -> HttpResponse:
        """End a response soon; one that has ended stays as it is."""
        id, tenant = _asked(request)
        run = self._stores.live.find(id, tenant)
        if run is None:
            return respond(self._stored(id, tenant).response)
        run.cancel()
        with anyio.move_on_after(self._service.settings.stall_seconds):
            await run.ring.wait_closed()
        return respond(run.response)

    async def delete(self, request: Request) -> HttpResponse:
        """Forget a response; those that continue it go on."""
        id, tenant = _asked(request)
        if not self._stores.shared.delete(id, tenant):
            raise not_found(id)
        self._stores.live.forget(id)
        return respond(Deleted(id))

    async def input_items(self, request: Request) -> HttpResponse:
        """The items that a response is the answer to, those of the responses before included."""
        id, tenant = _asked(request)
        chain = self._stored(id, tenant).chain()
        items = [item for stored in chain[:-1] for item in stored.items()]
        items += chain[-1].input
        if request.query_params.get("order", "desc") != "asc":
            items.reverse()
        return respond(_page(items, request))

    def _stored(self, id: str, tenant: str) -> Stored:
        stored = self._stores.find(id, tenant)
        if stored is None:
            raise not_found(id)
        return stored

    def _events(self, id: str, tenant: str) -> EventRing:
        self._stored(id, tenant)
        ring = self._stores.live.events(id)
        if ring is None:
            raise invalid(f"the events of the response '{id}' are gone", "stream")
        return ring

    def _stream(self, frames: AsyncIterator[bytes]) -> EventStream:
        return EventStream(frames, ping_seconds=self._service.settings.ping_seconds)


async def _followed(ring: EventRing, after: int) -> AsyncIterator[bytes]:
    last = after
    try:
        async with aclosing(ring.follow(after)) as events:
            async for event in events:
                last = event.sequence_number
                yield frame(event, event.type)
    except ApiError as error:
        yield _error_frame(error, last + 1)


def _error_frame(error: ApiError, number: int) -> bytes:
    event: ResponseEvent = ErrorEvent(
        sequence_number=number, message=error.message, code=error.code, param=error.param
    )
    return frame(event, event.type)


def _asked(request: Request) -> tuple[str, str]:
    return request.path_params["id"], caller(request).tenant


def _flag(request: Request, name: str) -> bool:
    return request.query_params.get(name, "").lower() in ("true", "1")


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError as error:
        raise invalid(f"{name} is {text!r}; it must be a whole number", name) from error


def _page(items: list[Item], request: Request) -> ItemList:
    limit = _number(request, "limit", DEFAULT_ITEMS)
    if not 1 <= limit <= MOST_ITEMS:
        raise invalid(f"limit is {limit}; it must be in [1, {MOST_ITEMS}]", "limit")
    after = request.query_params.get("after")
    if after is not None:
        at = next((at for at, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise invalid(f"no item has the id {after!r}", "after")
        items = items[at + 1 :]
    data = items[:limit]
    return ItemList(
        data=data,
        first_id=data[0]["id"] if data else None,
        last_id=data[-1]["id"] if data else None,
        has_more=len(items) > limit,
    )
