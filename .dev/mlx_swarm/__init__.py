"""mlx-swarm: many agents on one machine for the price of one prefix."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_swarm.agents import Swarm as Swarm
    from mlx_swarm.broker import Broker as Broker
    from mlx_swarm.broker import Completed as Completed
    from mlx_swarm.broker import Delta as Delta
    from mlx_swarm.broker import Grammar as Grammar
    from mlx_swarm.broker import Message as Message
    from mlx_swarm.broker import Request as Request
    from mlx_swarm.broker import Sampling as Sampling
    from mlx_swarm.broker import SwarmError as SwarmError
    from mlx_swarm.broker import Usage as Usage

_HOMES = {
    "Broker": "mlx_swarm.broker",
    "Completed": "mlx_swarm.broker",
    "Delta": "mlx_swarm.broker",
    "Grammar": "mlx_swarm.broker",
    "Message": "mlx_swarm.broker",
    "Request": "mlx_swarm.broker",
    "Sampling": "mlx_swarm.broker",
    "Swarm": "mlx_swarm.agents",
    "SwarmError": "mlx_swarm.broker",
    "Usage": "mlx_swarm.broker",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    """Import a public name from its home on first use, so that `import mlx_swarm` stays cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module 'mlx_swarm' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
