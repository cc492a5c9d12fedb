"""What a broker is told of an agent's next turn, through its API; and a wait that time ends."""

import math
from typing import Any

import anyio
import pytest

from mlx_swarm.broker import Broker, BrokerClosed, CacheError, InvalidRequest, Request
from mlx_swarm.broker.trace import events
from tests.tiny_broker import TINY, check_idle, inside, request, tiny

pytestmark = pytest.mark.anyio

SMALL = 40 << 10
"""Bytes for one conversation of `tests.tiny_broker` and no second one beside it."""


async def test_a_conversation_is_held_while_a_tool_runs() -> None:
    async with tiny() as broker:
        await broker.complete(request(1, swarm="s", tenant="t"))
        async with broker.holding(2.0, agent="agent-1", swarm="s", tenant="t") as kept:
            assert kept == 66 + 8
            assert (await broker.statistics()).engine.sessions.pins == 1
        assert (await broker.statistics()).engine.sessions.pins == 0
        assert await broker.pin(1.0, agent="agent-1") == 0
        await check_idle(broker)


async def test_too_many_pins_are_refused() -> None:
    async with tiny(ram=SMALL) as broker:
        await broker.complete(request(1))
        with pytest.raises(CacheError, match="would be pinned; the limit is"):
            await broker.pin(2.0, agent="agent-1")
        assert (await broker.statistics()).engine.sessions.pins_refused == 1


async def test_an_agent_that_has_ended_holds_no_place() -> None:
    async with tiny() as broker:
        for agent in (1, 2, 3):
            await broker.complete(request(agent, swarm="s"))
        assert (await broker.statistics()).engine.sessions.admitted == 3
        broker.next_use(math.inf, agent="agent-1", swarm="s")
        assert (await broker.statistics()).engine.sessions.admitted == 2
        broker.next_use(math.inf, swarm="s")
        assert (await broker.statistics()).engine.sessions.admitted == 0


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda broker: broker.next_use(-1), "seconds is -1; it must be seconds, 0 or more"),
        (lambda broker: broker.next_use(math.nan), "seconds is nan"),
        (lambda broker: broker.next_use(1.0, agent=3), "agent is 3; it must be text"),
        (lambda broker: broker.unpin(agent="a", swarm=None), "swarm is None"),
        (lambda broker: broker.stream(Request(text="a", next_use=True)), "next_use is True"),
        (lambda broker: broker.stream(Request(text="a", next_use=-0.5)), "next_use is -0.5"),
    ],
)
async def test_what_makes_no_sense_is_refused(call: Any, reason: str) -> None:
    async with tiny() as broker:
        with pytest.raises(InvalidRequest, match=reason):
            call(broker)
        for seconds in (0.0, -1.0, math.inf, "1"):
            with pytest.raises(InvalidRequest, match="seconds is"):
                await broker.pin(seconds, agent="a")  # type: ignore[arg-type]


async def test_a_closed_broker_says_so() -> None:
    broker = Broker(TINY)
    with pytest.raises(BrokerClosed):
        broker.next_use(1.0, agent="a")
    with pytest.raises(BrokerClosed):
        await broker.pin(1.0, agent="a")
    async with tiny() as open_:
        async with open_.holding(1.0, agent="a"):
            await open_.aclose()


async def test_sessions_that_wait_for_a_place_get_one_though_nothing_else_happens() -> None:
    """One-shot agents, none of which is said to have ended, with memory for one of them."""
    async with tiny(ram=SMALL) as broker:
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                for agent in range(6):
                    tasks.start_soon(broker.complete, request(agent))
        recorded = broker.recorder.events()
        assert any(isinstance(event, events.Deferred) for event in recorded)
        assert any(isinstance(event, events.Displaced) for event in recorded)
        assert await inside(broker, lambda engine: len(engine.sessions.policy._turns)) == 0
        await check_idle(broker)
