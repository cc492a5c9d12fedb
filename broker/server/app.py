"""The Starlette application: every endpoint, and who may call it."""

from collections.abc import Sequence
from typing import Protocol

from starlette.applications import Starlette
from starlette.routing import BaseRoute

from ..broker import Broker
from . import health
from .openapi import Operation
from .service import Service, service_over
from .settings import ServerSettings


class Surface(Protocol):
    """A module of endpoints."""

    @property
    def OPERATIONS(self) -> tuple[Operation, ...]:
        """What it answers to."""

    def routes(self, service: Service, /) -> list[BaseRoute]:
        """Its endpoints, over a service."""


SURFACES: tuple[Surface, ...] = (health,)


def create_app(broker: Broker, settings: ServerSettings) -> Starlette:
    """The application over an open broker. Whoever opened the broker closes it."""
    return application(service_over(broker, settings), SURFACES)


def application(service: Service, surfaces: Sequence[Surface]) -> Starlette:
    """The application of some modules of endpoints."""
    routes = [route for surface in surfaces for route in surface.routes(service)]
    app = Starlette(routes=routes)
    app.state.service = service
    return app
