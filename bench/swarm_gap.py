"""How long running agents wait for a token while a long prompt prefills, at the default policy."""

import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import anyio

from bench.swarm_clients import Clients, brokered
from bench.swarm_findings import Gap
from bench.swarm_setup import Setup, Supply, Tokens, supply
from mlx_swarm.broker.broker import Broker
from mlx_swarm.broker.request import Delta, Request


class GapSizes(NamedTuple):
    """Agents that run, their shared and own tokens, the prompt that comes, and how many tokens each
    agent has before it does.
    """

    agents: int
    shared: int
    own: int
    prompt: int
    steps: int = 48
    repeats: int = 3


class _Seen(NamedTuple):
    """Seconds: the median step before the prompt came, the longest gap after, its first token."""

    step: float
    gap: float
    prefill: float


def gap(setup: Setup, sizes: GapSizes) -> Iterator[Gap]:
    """Other prompts every time; the first time, which compiles and allocates, is not counted."""
    prompts = supply(setup, sizes.prompt)
    with brokered(setup, max_rows=sizes.agents + 1) as clients:
        seen = [_once(clients, prompts, sizes) for _ in range(1 + sizes.repeats)][1:]
    yield Gap(
        agents=sizes.agents,
        prompt=sizes.prompt,
        steps=tuple(1e3 * each.step for each in seen),
        gaps=tuple(1e3 * each.gap for each in seen),
        prefill_seconds=tuple(each.prefill for each in seen),
    )


def _once(clients: Clients, prompts: Supply, sizes: GapSizes) -> _Seen:
    agents = prompts.prompts(sizes.agents, sizes.shared, sizes.own)
    return clients.call(_watched, clients.broker, agents, prompts.take(sizes.prompt), sizes)


async def _watched(broker: Broker, agents: list[Tokens], prompt: Tokens, sizes: GapSizes) -> _Seen:
    times: list[list[float]] = [[] for _ in agents]
    ready = anyio.Event()

    async def agent(row: int) -> None:
        # More than it will come to: it is cancelled.
        request = Request(tokens=agents[row], max_tokens=sizes.prompt)
        async with broker.stream(request) as stream:
            async for event in stream:
                if isinstance(event, Delta) and event.tokens:
                    times[row].append(time.perf_counter())
                    if all(len(each) >= sizes.steps for each in times):
                        ready.set()

    async with anyio.create_task_group() as tasks:
        for row in range(len(agents)):
            tasks.start_soon(agent, row)
        await ready.wait()
        came = time.perf_counter()
        await broker.complete(Request(tokens=prompt, max_tokens=2))
        done = time.perf_counter()
        tasks.cancel_scope.cancel()
    began = max(each[0] for each in times)
    step = statistics.median(_gaps(times, began, came))
    return _Seen(step, max(_gaps(times, came, done)), done - came)


def _gaps(times: list[list[float]], start: float, stop: float) -> list[float]:
    """The gaps between a row's tokens that overlap with a time."""
    return [b - a for row in times for a, b in pairwise(row) if b > start and a < stop]
