"""A server of the administrative endpoints alone, and clients of it with keys."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlx_swarm.broker import Broker
from mlx_swarm.broker.server.admin import (
    cache_admin,
    metrics,
    model_routes,
    text_routes,
    trace_feed,
)
from mlx_swarm.broker.server.admin.prompts import PromptBody
from mlx_swarm.broker.server.app import application
from mlx_swarm.broker.server.bodies import read, respond
from mlx_swarm.broker.server.openapi import Operation
from mlx_swarm.broker.server.service import Service, service_over
from mlx_swarm.broker.server.settings import ApiKey, ServerSettings
from mlx_swarm.broker.server.turns.callers import caller
from mlx_swarm.broker.server.turns.turn import Turn
from tests.server.serving import serving

KEYED = ServerSettings(api_keys=(ApiKey("one", "first"), ApiKey("two", "second")))


class Replies(ModuleType):
    """An endpoint that answers, so that there is something to see."""

    OPERATIONS: tuple[Operation, ...] = ()

    @staticmethod
    def routes(service: Service) -> list[Any]:
        async def reply(request: Request) -> Response:
            body = await read(request, PromptBody)
            turn = Turn(prompt=body.given(), caller=caller(request), max_tokens=4)
            async with await service.generator.start(turn) as generation:
                ended = await generation.end()
            return respond({"text": ended.text, "prefilled": ended.usage.prefilled_tokens})

        return [Route("/reply", reply, methods=["POST"])]


SURFACES = (cache_admin, metrics, model_routes, text_routes, trace_feed, Replies("replies"))


@contextmanager
def administered(
    monkeypatch: pytest.MonkeyPatch, settings: ServerSettings | None = None, **broker: Any
) -> Iterator[str]:
    """The address of a server."""
    monkeypatch.setattr("tests.server.serving.create_app", _application)
    with serving(settings=settings, **broker) as url:
        yield url


def client(url: str, key: str = "") -> httpx.Client:
    """A client with a key."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=30)


def _application(broker: Broker, settings: ServerSettings) -> Starlette:
    made = application(service_over(broker, settings), SURFACES)
    made.user_middleware.insert(0, Middleware(metrics.HttpCounter))
    return made
