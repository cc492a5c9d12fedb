"""What every endpoint works with."""

from typing import NamedTuple

from ..broker import Broker
from .generation import Generator
from .settings import ServerSettings


class Service(NamedTuple):
    """An open broker, the turns on it, and the server's settings."""

    broker: Broker
    generator: Generator
    settings: ServerSettings
