"""What every endpoint works with."""

from typing import NamedTuple

from ..broker import Broker
from .entrance.draining import Draining
from .responses.store import Stores
from .settings import ServerSettings
from .turns.generation import Generator
from .turns.histories import Histories


class Service(NamedTuple):
    """An open broker, the turns on it, the server's settings, whether it is about to end, and the
    responses that it knows.
    """

    broker: Broker
    generator: Generator
    settings: ServerSettings
    draining: Draining
    stores: Stores


def service_over(broker: Broker, settings: ServerSettings) -> Service:
    """What endpoints over an open broker work with."""
    generator = Generator(broker, Histories(), settings.default_tokens)
    draining = Draining(generator.cancel_all)
    return Service(broker, generator, settings, draining, Stores.of(settings))
