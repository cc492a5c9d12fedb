"""The Starlette application: every endpoint, and who may call it."""

from collections.abc import Sequence
from typing import Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from ..broker import Broker
from ..errors import SwarmError
from .admin import cache_admin, health, metrics, model_routes, text_routes, trace_feed
from .chat import routes as chat
from .completions import routes as completions
from .entrance.draining import Draining
from .entrance.front import Front, Gate
from .entrance.limits import Limits
from .entrance.refusals import refusal
from .entrance.security import Security
from .errors import ApiError, api_error
from .http import CLIENT_CLOSED_REQUEST, Gone
from .messages import routes as messages
from .openapi import Operation, openapi_routes
from .responses import routes as responses
from .responses import socket as responses_socket
from .service import Service, service_over
from .settings import ServerSettings


class Surface(Protocol):
    """A module of endpoints."""

    @property
    def OPERATIONS(self) -> tuple[Operation, ...]:
        """What it answers to."""

    def routes(self, service: Service, /) -> list[BaseRoute]:
        """Its endpoints, over a service."""


SURFACES: tuple[Surface, ...] = (
    health,
    responses,
    responses_socket,
    chat,
    completions,
    messages,
    model_routes,
    text_routes,
    cache_admin,
    trace_feed,
    metrics,
)


def create_app(broker: Broker, settings: ServerSettings) -> Starlette:
    """The application over an open broker. Whoever opened the broker closes it."""
    return application(service_over(broker, settings), SURFACES)


def application(service: Service, surfaces: Sequence[Surface]) -> Starlette:
    """The application of some modules of endpoints."""
    routes = [route for surface in surfaces for route in surface.routes(service)]
    operations = [each for surface in surfaces for each in surface.OPERATIONS]
    app = guarded([*routes, *openapi_routes(operations)], service.settings, service.draining)
    app.state.service = service
    return app


def guarded(routes: Sequence[BaseRoute], settings: ServerSettings, draining: Draining) -> Starlette:
    """Endpoints behind everything that stands before them. What they raise becomes JSON."""
    before = [
        Middleware(metrics.HttpCounter),
        Middleware(Front, draining),
        Middleware(Security, settings),
        Middleware(Limits, settings.max_body),
        Middleware(Gate, draining),
    ]
    handlers = {
        HTTPException: _answer,
        SwarmError: _answer,
        TimeoutError: _answer,
        Gone: _answer_nobody,
        ClientDisconnect: _answer_nobody,
    }
    app = Starlette(routes=routes, middleware=before, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


async def _answer(request: Request, error: Exception) -> Response:
    """Report what an endpoint raised. That of a WebSocket goes on to `Front`."""
    if request.scope["type"] != "http":
        raise error
    path, request_id = request.scope["path"], request.scope["state"]["request_id"]
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        return refusal(path, _of_starlette(request, error), request_id, headers)
    return refusal(path, api_error(error), request_id)


async def _answer_nobody(request: Request, error: Exception) -> Response:
    """End a request whose client has gone."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def _of_starlette(request: Request, error: HTTPException) -> ApiError:
    match error.status_code:
        case 404:
            return ApiError(404, "there is nothing under this path", code="not_found")
        case 405:
            method = request.scope["method"]
            return ApiError(405, f"this path does not answer to {method}", code="not_allowed")
    return ApiError(error.status_code, error.detail)
