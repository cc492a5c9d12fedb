"""Whether the server is there and what it is: no call of these waits for the engine."""

from collections.abc import Awaitable, Callable
from importlib import metadata
from typing import Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..bodies import respond
from ..errors import RETRY_SECONDS
from ..openapi import Operation
from ..service import Service

Status = Literal["ok", "draining"]


class Health(Struct, frozen=True):
    """`draining`: a signal has come, what runs is finished, and new work refused."""

    status: Status
    model: str
    version: str


class Welcome(Struct, frozen=True):
    """What answers here."""

    name: str
    version: str
    model: str
    endpoints: tuple[str, ...]


OPERATIONS = (
    Operation(
        "GET",
        "/healthz",
        "Whether the server takes work",
        response=Health,
        errors=(503,),
        same_body=(503,),
    ),
    Operation("GET", "/", "What answers here", response=Welcome),
)


def routes(service: Service) -> list[BaseRoute]:
    """`/healthz` and `/`."""
    return [
        Route("/healthz", _health(service), methods=["GET"]),
        Route("/", _welcome(service), methods=["GET"]),
    ]


def _health(service: Service) -> Callable[[Request], Awaitable[Response]]:
    async def health(request: Request) -> Response:
        draining = service.draining.started
        status: Status = "draining" if draining else "ok"
        body = Health(status, service.broker.model_name, version())
        if draining:
            return respond(body, 503, {"retry-after": str(RETRY_SECONDS)})
        return respond(body)

    return health


def _welcome(service: Service) -> Callable[[Request], Awaitable[Response]]:
    async def welcome(request: Request) -> Response:
        paths = dict.fromkeys(getattr(route, "path", "") for route in request.app.routes)
        body = Welcome("mlx-swarm", version(), service.broker.model_name, tuple(paths))
        return respond(body)

    return welcome


def version() -> str:
    """The version that is installed."""
    return metadata.version("mlx-swarm")
