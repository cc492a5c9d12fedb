"""What the agents of one swarm have in common."""

from anyio import CapacityLimiter
from anyio.abc import TaskGroup
from msgspec import Struct

from mlx_swarm.broker.checks import check_kind
from mlx_swarm.broker.request import Grammar, Request, Sampling

from .events import EventFeed
from .interface import SwarmBroker


class Settings(Struct, frozen=True, kw_only=True):
    """How a swarm's agents generate. An agent can be spawned with its own."""

    swarm: str
    max_tokens: int = 256
    sampling: Sampling = Sampling()
    grammar: Grammar | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    seed: int | None = None
    model: str = ""
    draft: str = ""
    deterministic: bool = False
    tenant: str = ""
    priority: int = 0
    deadline: float | None = None
    cache: bool = True

    def validate(self) -> None:
        """Raise `InvalidRequest` for what no turn could be asked with."""
        if self.seed is not None:
            check_kind("seed", self.seed, int, "a whole number")
        Request(
            text="a task",
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            grammar=self.grammar,
            stop=self.stop,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
            model=self.model,
            draft=self.draft,
            deterministic=self.deterministic,
            tenant=self.tenant,
            swarm=self.swarm,
            priority=self.priority,
            deadline=self.deadline,
            cache=self.cache,
        ).validate()


class Scope:
    """The open scope of a swarm: where its turns run, and where their events go."""

    def __init__(
        self,
        broker: SwarmBroker,
        tasks: TaskGroup,
        feed: EventFeed,
        limiter: CapacityLimiter,
    ) -> None:
        self.broker = broker
        self.tasks = tasks
        self.feed = feed
        self.limiter = limiter
        self.closed = False
