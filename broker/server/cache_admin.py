"""`/v1/cache`: what the prompt cache has of a tenant, and how to pin, warm, write and clear it."""

from http import HTTPStatus

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..errors import CacheError
from ..inspection import DEFAULT_LISTED, MAX_LISTED, CacheView, NamespaceView
from .bodies import read, respond
from .callers import caller
from .errors import ApiError, invalid
from .guarded import guarded
from .histories import Prompt
from .prompts import PromptBody
from .service import Service
from .turn import Turn
from .visibility import reason_for, seen_by, tenant_of


class PinBody(PromptBody, kw_only=True):
    """What is to be kept, and for how many seconds."""

    seconds: float = 300.0


class FlushBody(Struct, kw_only=True):
    """How many seconds writing may take; no request goes on meanwhile."""

    seconds: float = 10.0


class CacheAdmin:
    """The endpoints. Without API keys a caller sees what there is of all tenants."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @property
    def _view(self) -> CacheView:
        return self._service.broker.cache_view

    async def show(self, request: Request) -> Response:
        """The namespaces, or with `namespace` a page of its entries, the last used first."""
        seen = seen_by(request, self._service)
        namespaces = await self._view.namespaces(seen)
        name = request.query_params.get("namespace")
        if name is None:
            return respond(
                {"object": "list", "data": [_namespace(each, seen) for each in namespaces]}
            )
        if name not in [each.namespace for each in namespaces]:
            raise ApiError(
                HTTPStatus.NOT_FOUND, f"no namespace {name[:80]!r} is in use", param="namespace"
            )
        offset = _number(request, "offset", 0, 1 << 31)
        limit = _number(request, "limit", DEFAULT_LISTED, MAX_LISTED)
        found = await self._view.entries(name, offset=offset, limit=limit)
        shown = offset + len(found.entries)
        return respond(
            {
                "object": "list",
                "namespace": name,
                "total": found.total,
                "has_more": shown < found.total and bool(found.entries),
                "next_offset": shown,
                "data": found.entries,
            }
        )

    async def clear(self, request: Request) -> Response:
        """Forget what memory has, of one model or of all; the cold tier keeps its files."""
        model = request.query_params.get("model")
        cleared = await self._view.clear(model=model, tenant=seen_by(request, self._service))
        return respond({"object": "cache.cleared", "tokens": cleared})

    async def plan(self, request: Request) -> Response:
        """Where the KV of a prompt would come from."""
        body = await read(request, PromptBody)
        prompt = await self._prompt(request, body)
        plan = await self._view.plan(prompt.tokens, model=body.model, tenant=tenant_of(request))
        seen = seen_by(request, self._service)
        return respond(
            {
                "object": "cache.plan",
                "prompt_tokens": plan.prompt_tokens,
                "ram_tokens": plan.ram_tokens,
                "cold_tokens": plan.cold_tokens,
                "prefill_tokens": plan.to_prefill,
                "donor": plan.donor,
                "reason": reason_for(seen, plan.reason),
                "divergence": plan.divergence,
                "boundaries": prompt.boundaries,
            }
        )

    async def pin(self, request: Request) -> Response:
        """Keep what memory has of a prompt; 0 `seconds` end that."""
        body = await read(request, PinBody)
        prompt = await self._prompt(request, body)
        asked = {"model": body.model, "tenant": tenant_of(request)}
        try:
            if body.seconds == 0:
                pinned = await self._view.unpin(prompt.tokens, **asked)
            else:
                pinned = await self._view.pin(prompt.tokens, body.seconds, **asked)
        except CacheError as error:
            raise ApiError(HTTPStatus.CONFLICT, str(error), code="cache_full") from error
        return respond(
            {"object": "cache.pin", "tokens": pinned, "prompt_tokens": len(prompt.tokens)}
        )

    async def warm(self, request: Request) -> Response:
        """Compute a prompt and keep it, without a reply."""
        turn = self._turn(request, await read(request, PromptBody))
        async with await self._service.generator.start(turn) as generation:
            usage = (await generation.end()).usage
        return respond(
            {
                "object": "cache.warmed",
                "prompt_tokens": usage.prompt_tokens,
                "ram_tokens": usage.ram_tokens,
                "cold_tokens": usage.cold_tokens,
                "prefilled_tokens": usage.prefilled_tokens,
            }
        )

    async def flush(self, request: Request) -> Response:
        """Write what only memory has to the cold tier."""
        body = await read(request, FlushBody) if await request.body() else FlushBody()
        seen = seen_by(request, self._service)
        left = await self._view.flush(body.seconds, tenant=seen)
        return respond(
            {"object": "cache.flushed", "writes_left": left.writes, "bytes_left": left.bytes}
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
    posts = {"plan": admin.plan, "pin": admin.pin, "warm": admin.warm, "flush": admin.flush}
    return [
        Route("/v1/cache", guarded(admin.show), methods=["GET"]),
        Route("/v1/cache", guarded(admin.clear), methods=["DELETE"]),
        *(
            Route(f"/v1/cache/{name}", guarded(endpoint), methods=["POST"])
            for name, endpoint in posts.items()
        ),
    ]


def _namespace(view: NamespaceView, seen: str | None) -> object:
    found = view.statistics
    reasons: dict[str, int] = {}
    for reason, count in found.reasons.items():
        name = reason_for(seen, reason) or reason
        reasons[name] = reasons.get(name, 0) + count
    return {
        "object": "cache.namespace",
        "namespace": view.namespace,
        "model": view.model,
        "tokens": found.tokens,
        "bytes": found.total_bytes,
        "pinned_bytes": found.pinned_bytes,
        "leased_bytes": found.leased_bytes,
        "undurable_bytes": found.undurable_bytes,
        "hits": found.hits,
        "misses": found.misses,
        "hit_tokens": found.hit_tokens,
        "missed_tokens": found.missed_tokens,
        "evictions": found.evictions,
        "restores": found.restores,
        "reasons": reasons,
    }


def _number(request: Request, name: str, default: int, highest: int) -> int:
    text = request.query_params.get(name, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 12 or int(text) > highest:
        raise invalid(f"{name} is {text[:40]!r}; it must be a whole number up to {highest}", name)
    return int(text)
