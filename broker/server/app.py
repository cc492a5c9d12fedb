"""The Starlette application: every endpoint, and who may call it."""

from starlette.applications import Starlette
from starlette.routing import BaseRoute

from ..broker import Broker
from .generation import Generator
from .histories import Histories
from .service import Service
from .settings import ServerSettings


def create_app(broker: Broker, settings: ServerSettings) -> Starlette:
    """The application over an open broker. Whoever opened the broker closes it."""
    service = Service(broker, Generator(broker, Histories(), settings.default_tokens), settings)
    routes: list[BaseRoute] = []
    app = Starlette(routes=routes)
    app.state.service = service
    return app
