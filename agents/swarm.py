"""A swarm: agents that share instructions, and the scope in which they live."""

from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from math import inf
from types import TracebackType
from typing import Self

import anyio
from msgspec.structs import replace

from mlx_swarm.broker.checks import check_kind, check_text, check_whole
from mlx_swarm.broker.errors import InvalidRequest, SwarmClosed, SwarmError
from mlx_swarm.broker.request import Grammar, Sampling, Usage

from .agent import Agent, check_task
from .events import EventFeed, EventStream
from .interface import SwarmBroker
from .results import Results
from .scope import Scope, Settings

GREEDY = Sampling()

CONCURRENCY = 512
"""Turns of a swarm that are with the broker at one time: two swarms fit into its queue."""


class Swarm:
    """Agents with the same `instructions`, which are prefilled and held once for all of them.

    `async with Swarm(broker, instructions=…) as swarm:` opens the scope in which agents are
    spawned. Leaving it waits for all of them; an exception in it cancels them. Nothing is left
    running. An agent's failure is its own: it reaches whoever awaits that agent, the others go on.

    `concurrency` bounds the turns that are with the broker at one time, the others wait here: a
    broker lets about a thousand wait (`max_queue`). `max_tokens`, `sampling`, `grammar`, `stop`,
    `logprobs`, `top_logprobs`, `priority` and `deadline` hold for every turn, as in a `Request`; a
    deadline runs from when the turn is with the broker. With `seed`, or a seed in `sampling`, a
    turn's own seed is derived from that seed, the agent's name and the number of the turn. `model`
    names one of the broker's models or adapters, by default its first; with `draft` another one
    proposes tokens, with `deterministic` turns run as in mlx-lm alone, one at a time (see
    `Request`). `tenant` separates caches; `cache=False` neither reads nor writes the cache.
    """

    def __init__(
        self,
        broker: SwarmBroker,
        *,
        instructions: str = "",
        concurrency: int = CONCURRENCY,
        max_tokens: int = 256,
        sampling: Sampling = GREEDY,
        grammar: Grammar | None = None,
        stop: Iterable[str] = (),
        logprobs: bool = False,
        top_logprobs: int = 0,
        seed: int | None = None,
        model: str = "",
        draft: str = "",
        deterministic: bool = False,
        tenant: str = "",
        priority: int = 0,
        deadline: float | None = None,
        name: str = "swarm",
        cache: bool = True,
    ) -> None:
        check_whole("concurrency", concurrency, 1, "at least 1")
        if instructions:
            check_text("instructions", instructions)
        self.name = name
        self.instructions = instructions
        self._broker = broker
        self._concurrency = concurrency
        self._settings = Settings(
            swarm=name,
            max_tokens=max_tokens,
            sampling=sampling,
            grammar=grammar,
            stop=_several("stop", stop),
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            seed=seed,
            model=model,
            draft=draft,
            deterministic=deterministic,
            tenant=tenant,
            priority=priority,
            deadline=deadline,
            cache=cache,
        )
        self._settings.validate()
        self._agents: dict[str, Agent] = {}
        self._numbers = count(1)
        self._feed = EventFeed()
        self._scope: Scope | None = None

    def spawn(
        self,
        task: str,
        *,
        name: str | None = None,
        model: str | None = None,
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        grammar: Grammar | None = None,
        stop: Iterable[str] | None = None,
        priority: int | None = None,
        deadline: float | None = None,
    ) -> Agent:
        """Start an agent on `task` and return its handle at once; `await` it for its reply.

        Without a name it is called agent-1, agent-2 and so on. Raises `InvalidRequest` for an empty
        task, a name that is taken and a bad setting, `SwarmClosed` outside the swarm's scope.
        """
        check_task(task)
        scope = self._open_scope()
        settings = self._settings
        if model is not None:
            settings = replace(settings, model=model)
        if max_tokens is not None:
            settings = replace(settings, max_tokens=max_tokens)
        if sampling is not None:
            settings = replace(settings, sampling=sampling)
        if grammar is not None:
            settings = replace(settings, grammar=grammar)
        if stop is not None:
            settings = replace(settings, stop=_several("stop", stop))
        if priority is not None:
            settings = replace(settings, priority=priority)
        if deadline is not None:
            settings = replace(settings, deadline=deadline)
        settings.validate()
        agent = Agent(self._new_name(name), self.instructions, scope, settings)
        agent.ask(task)
        self._agents[agent.name] = agent
        return agent

    async def map(self, tasks: Iterable[str]) -> Results:
        """Run an agent on every task; the results in the order of the tasks, failed ones included.

        Cancelling it cancels them.
        """
        tasks = _several("tasks", tasks)
        for task in tasks:
            check_task(task)
        agents = [self.spawn(task) for task in tasks]
        for agent in agents:
            agent.turns[0].is_last = True
        try:
            return Results([await agent.turns[0].end() for agent in agents])
        finally:
            for agent in agents:
                agent.cancel()

    def events(self) -> EventStream:
        """What happens from now on, all agents merged.

        Ends when no turn is running or queued any more; begun before the first turn, it waits.
        """
        return self._feed.subscribe()

    @property
    def agents(self) -> tuple[Agent, ...]:
        """All agents, in the order in which they were spawned."""
        return tuple(self._agents.values())

    @property
    def usage(self) -> Usage:
        """The cost of all turns that are over, failed ones included."""
        return sum((agent.usage for agent in self._agents.values()), Usage())

    async def __aenter__(self) -> Self:
        if self._scope is not None:
            raise SwarmClosed(f"swarm {self.name!r} was entered already; a swarm has one scope")
        limiter = anyio.CapacityLimiter(self._concurrency)
        tasks = anyio.create_task_group()
        await tasks.__aenter__()
        self._scope = Scope(self._broker, tasks, self._feed, limiter)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        scope = self._open_scope()
        scope.closed = True
        if error is not None:
            scope.tasks.cancel_scope.cancel()
        # The group is not told of the error: it would wrap it, and agents raise nothing themselves.
        try:
            await scope.tasks.__aexit__(None, None, None)
        finally:
            self._feed.close()
            self._say_farewell()

    def _say_farewell(self) -> None:
        """Nobody of the swarm comes back: what is its agents' own may leave memory first."""
        with suppress(SwarmError):  # the broker may be closed already
            self._broker.next_use(inf, swarm=self.name, tenant=self._settings.tenant)

    def _open_scope(self) -> Scope:
        if self._scope is None or self._scope.closed:
            when = "before its scope was entered" if self._scope is None else "after its scope"
            raise SwarmClosed(f"swarm {self.name!r} was used {when}: use `async with Swarm(…)`")
        return self._scope

    def _new_name(self, name: str | None) -> str:
        if name is None:
            return next(free for n in self._numbers if (free := f"agent-{n}") not in self._agents)
        check_kind("an agent's name", name, str, "text")
        if not name or name in self._agents:
            problem = "an agent's name is empty" if not name else f"the name {name!r} is taken"
            raise InvalidRequest(f"{problem} in swarm {self.name!r}")
        return name


def _several(name: str, values: Iterable[str]) -> tuple[str, ...]:
    """All of several texts. One text is an iterable, too, of letters: that is never meant."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise InvalidRequest(f"{name} is {values!r:.60}; it must be a list of texts")
    return tuple(values)
