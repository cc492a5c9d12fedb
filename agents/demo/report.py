"""What a run of the demo cost, read from its trace."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from msgspec import Struct

from mlx_swarm.broker.errors import TraceError
from mlx_swarm.broker.trace.events import Event, Finished, FirstToken, Planned, Queued

AnyEvent = TypeVar("AnyEvent", Queued, Planned, FirstToken, Finished)


class AgentRun(Struct, frozen=True, kw_only=True):
    """One agent's request. `restored_tokens` are those of `cached_tokens` that were read from disk;
    `too_slow` if there were more, but computing them was faster. Times are seconds on the clock of
    the trace.
    """

    name: str
    prompt_tokens: int
    cached_tokens: int
    restored_tokens: int
    prefilled_tokens: int
    output_tokens: int
    text: str
    submitted: float
    first_token: float
    finished: float
    too_slow: bool = False

    @property
    def ttft(self) -> float:
        """Seconds from submission to the first token."""
        return self.first_token - self.submitted

    @property
    def rate(self) -> float:
        """Tokens a second after the first one; 0 if there was only one."""
        seconds = self.finished - self.first_token
        return (self.output_tokens - 1) / seconds if seconds > 0 else 0.0


class Run(Struct, frozen=True):
    """All agents of one run. `shared_prefix_tokens` is the length of their common instructions."""

    shared_prefix_tokens: int
    agents: tuple[AgentRun, ...]

    @property
    def seconds(self) -> float:
        """From the first submission to the last token."""
        return max(a.finished for a in self.agents) - min(a.submitted for a in self.agents)

    @property
    def last_first_token(self) -> float:
        """Seconds until the last of the agents had its first token."""
        return max(a.first_token for a in self.agents) - min(a.submitted for a in self.agents)

    def total(self, field: Callable[[AgentRun], int]) -> int:
        """The sum of a field over all agents."""
        return sum(map(field, self.agents))

    def as_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {
            "agents": len(self.agents),
            "shared_prefix_tokens": self.shared_prefix_tokens,
            "prompt_tokens": self.total(lambda a: a.prompt_tokens),
            "cached_tokens": self.total(lambda a: a.cached_tokens),
            "restored_tokens": self.total(lambda a: a.restored_tokens),
            "prefilled_tokens": self.total(lambda a: a.prefilled_tokens),
            "seconds": round(self.seconds, 3),
            "per_agent": [_agent_json(agent) for agent in self.agents],
        }


def read_run(
    events: Iterable[Event], swarm: str, shared_prefix_tokens: int, texts: Mapping[str, str]
) -> Run:
    """The run of `swarm` as its trace tells it, agents in the order of `texts` (name to reply).

    Raises `TraceError` if the run was so long that the trace has lost its beginning.
    """
    kept = list(events)
    queued = {event.agent: event for event in _only(Queued, kept) if event.swarm == swarm}
    planned = {event.request: event for event in _only(Planned, kept)}
    first = {event.request: event for event in _only(FirstToken, kept)}
    finished = {event.request: event for event in _only(Finished, kept)}

    def agent_run(name: str, text: str) -> AgentRun:
        start = queued[name]
        plan, end = planned[start.request], finished[start.request]
        return AgentRun(
            name=name,
            prompt_tokens=plan.prompt_tokens,
            cached_tokens=plan.ram_tokens + plan.cold_tokens,
            restored_tokens=plan.cold_tokens,
            too_slow=plan.reason == "cost_gate",
            prefilled_tokens=plan.prefilled_tokens,
            output_tokens=end.output_tokens,
            text=text,
            submitted=start.submitted,
            first_token=first[start.request].time,
            finished=end.time,
        )

    try:
        return Run(shared_prefix_tokens, tuple(agent_run(*item) for item in texts.items()))
    except KeyError:
        raise TraceError(
            f"the run outgrew its trace, which holds the last {len(kept):,} events: "
            "run fewer agents, or let them write less"
        ) from None


def _only(kind: type[AnyEvent], events: list[Event]) -> list[AnyEvent]:
    return [event for event in events if isinstance(event, kind)]


def _agent_json(agent: AgentRun) -> dict[str, Any]:
    return {
        "name": agent.name,
        "prompt_tokens": agent.prompt_tokens,
        "cached_tokens": agent.cached_tokens,
        "prefilled_tokens": agent.prefilled_tokens,
        "ttft_s": round(agent.ttft, 3),
        "output_tokens": agent.output_tokens,
        "text": agent.text,
    }
