"""Swarms of agents on a broker."""

from .agent import Agent
from .events import (
    AgentDelta,
    AgentFailed,
    AgentFinished,
    AgentStarted,
    AgentStopped,
    SwarmEvent,
)
from .interface import SwarmBroker
from .results import AgentResult, Results
from .swarm import Swarm
from .turn import Turn

__all__ = [
    "Agent",
    "AgentDelta",
    "AgentFailed",
    "AgentFinished",
    "AgentResult",
    "AgentStarted",
    "AgentStopped",
    "Results",
    "Swarm",
    "SwarmBroker",
    "SwarmEvent",
    "Turn",
]
