"""`/v1/cache`: what the prompt cache has of a tenant, and how to pin, warm, write and clear it."""

from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ...errors import CacheError, InvalidRequest
from ...inspection import MAX_LISTED, CacheView
from ...request import Usage
from ...trace.events import Divergence
from ..bodies import decode, read, respond
from ..errors import ApiError, api_error
from ..http import unless_gone
from ..openapi import Operation
from ..service import Service
from ..turns.callers import caller
from ..turns.histories import Prompt
from ..turns.turn import Turn
from .cache_bodies import (
    CacheQuery,
    ClearAnswer,
    ClearQuery,
    DivergenceBody,
    EntryList,
    FlushAnswer,
    FlushBody,
    NamespaceList,
    PinAnswer,
    PinBody,
    PlanAnswer,
    WarmAnswer,
    namespace_of,
)
from .prompts import PromptBody
from .queries import whole
from .visibility import reason_for, seen_by, tenant_of

OPERATIONS = (
    Operation(
        "GET",
        "/v1/cache",
        "What the prompt cache has in memory",
        query=CacheQuery,
        response=NamespaceList | EntryList,
        errors=(404,),
    ),
    Operation(
        "DELETE",
        "/v1/cache",
        "Forget what is in memory; files of the cold tier stay",
        query=ClearQuery,
        response=ClearAnswer,
        errors=(404,),
    ),
    Operation(
        "POST",
        "/v1/cache/plan",
        "Where the KV of a prompt would come from",
        body=PromptBody,
        response=PlanAnswer,
        errors=(404,),
    ),
    Operation(
        "POST",
        "/v1/cache/pin",
        "Keep a prompt in memory for a time",
        body=PinBody,
        response=PinAnswer,
        errors=(404, 409),
    ),
    Operation(
        "POST",
        "/v1/cache/warm",
        "Compute a prompt without a reply",
        body=PromptBody,
        response=WarmAnswer,
        errors=(404,),
    ),
    Operation(
        "POST",
        "/v1/cache/flush",
        "Write what only memory has to the cold tier",
        body=FlushBody,
        response=FlushAnswer,
    ),
)
MAX_OFFSET = 1 << 31


class CacheAdmin:
    """The endpoints. Without API keys a caller sees what there is of all tenants."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @property
    def _view(self) -> CacheView:
        return self._service.broker.cache_view

    async def show(self, request: Request) -> Response:
        """The namespaces, or a page of the entries of one."""
        seen = seen_by(request, self._service)
        namespaces = await self._view.namespaces(seen)
        name = request.query_params.get("namespace")
        if name is None:
            data = tuple(namespace_of(each, seen) for each in namespaces)
            return respond(NamespaceList(data=data))
        if name not in [each.namespace for each in namespaces]:
            message = f"no namespace {name[:80]!r} is in use"
            raise ApiError(HTTPStatus.NOT_FOUND, message, code="not_found", param="namespace")
        defaults = CacheQuery()
        offset = whole(request, "offset", defaults.offset, 0, MAX_OFFSET)
        limit = whole(request, "limit", defaults.limit, 0, MAX_LISTED)
        found = await self._view.entries(name, offset=offset, limit=limit)
        after = offset + len(found.entries)
        answer = EntryList(
            namespace=name,
            total=found.total,
            has_more=after < found.total,
            next_offset=after,
            data=found.entries,
        )
        return respond(answer)

    async def clear(self, request: Request) -> Response:
        """Forget what memory has, of one model or of all."""
        model = request.query_params.get("model")
        cleared = await self._view.clear(model=model, tenant=seen_by(request, self._service))
        return respond(ClearAnswer(tokens=cleared))

    async def plan(self, request: Request) -> Response:
        """Where the KV of a prompt would come from."""
        body = await read(request, PromptBody)
        prompt = await self._prompt(request, body)
        plan = await self._view.plan(prompt.tokens, model=body.model, tenant=tenant_of(request))
        answer = PlanAnswer(
            prompt_tokens=plan.prompt_tokens,
            ram_tokens=plan.ram_tokens,
            cold_tokens=plan.cold_tokens,
            prefill_tokens=plan.to_prefill,
            donor=plan.donor,
            reason=reason_for(seen_by(request, self._service), plan.reason),
            divergence=await self._told(plan.divergence, body.model),
            boundaries=prompt.boundaries,
        )
        return respond(answer)

    async def pin(self, request: Request) -> Response:
        """Keep what memory has of a prompt, or end that."""
        body = await read(request, PinBody)
        prompt = await self._prompt(request, body)
        model, tenant = body.model, tenant_of(request)
        try:
            if body.seconds == 0:
                pinned = await self._view.unpin(prompt.tokens, model=model, tenant=tenant)
            else:
                pinned = await self._view.pin(
                    prompt.tokens, body.seconds, model=model, tenant=tenant
                )
        except CacheError as error:
            raise ApiError(HTTPStatus.CONFLICT, str(error), code="cache_full") from error
        return respond(PinAnswer(prompt_tokens=len(prompt.tokens), tokens=pinned))

    async def warm(self, request: Request) -> Response:
        """Compute a prompt and keep it."""
        turn = self._turn(request, await read(request, PromptBody))

        async def work() -> Usage:
            try:
                async with await self._service.generator.start(turn) as generation:
                    return (await generation.end()).usage
            except InvalidRequest as error:
                raise api_error(error, names={}) from error

        usage = await unless_gone(request, work)
        answer = WarmAnswer(
            prompt_tokens=usage.prompt_tokens,
            ram_tokens=usage.ram_tokens,
            cold_tokens=usage.cold_tokens,
            prefilled_tokens=usage.prefilled_tokens,
        )
        return respond(answer)

    async def flush(self, request: Request) -> Response:
        """Write what only memory has to the cold tier. A body may be left out."""
        body = decode(FlushBody, await request.body() or b"{}")
        left = await self._view.flush(body.seconds, tenant=seen_by(request, self._service))
        return respond(FlushAnswer(writes_left=left.writes, bytes_left=left.bytes))

    async def _told(self, divergence: Divergence | None, model: str) -> DivergenceBody | None:
        """A divergence with the texts of its tokens."""
        if divergence is None:
            return None
        stored, wanted = divergence.stored, divergence.wanted
        return DivergenceBody(
            index=divergence.index,
            stored=stored,
            wanted=wanted,
            stored_text=await self._service.broker.decode([stored], model=model),
            wanted_text=await self._service.broker.decode([wanted], model=model),
        )

    async def _prompt(self, request: Request, body: PromptBody) -> Prompt:
        return await self._service.generator.prompt(self._turn(request, body))

    def _turn(self, request: Request, body: PromptBody) -> Turn:
        who = caller(
            request, cache_key=body.prompt_cache_key, user=body.user, metadata=body.metadata
        )
        return Turn(prompt=body.given(), caller=who, model=body.model, generate=False)


def routes(service: Service) -> list[BaseRoute]:
    """All of `/v1/cache`."""
    admin = CacheAdmin(service)
    endpoints = (admin.show, admin.clear, admin.plan, admin.pin, admin.warm, admin.flush)
    return [
        Route(operation.path, endpoint, methods=[operation.method])
        for operation, endpoint in zip(OPERATIONS, endpoints, strict=True)
    ]
