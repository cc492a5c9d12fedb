"""What a swarm tells the broker of the future: who goes on, when, and who never does."""

import math
from contextlib import suppress

import pytest

from mlx_swarm.agents import Swarm
from tests.agents.fake_broker import FakeBroker, Reply, user_text

pytestmark = pytest.mark.anyio


async def test_a_turn_with_another_one_queued_says_that_it_is_needed_at_once() -> None:
    broker = FakeBroker()
    async with Swarm(broker) as swarm:
        agent = swarm.spawn("one")
        agent.ask("two")
        await agent.ask("three")
    said = {user_text(request): request.next_use for request in broker.requests}
    assert said == {"one": 0.0, "two": 0.0, "three": None}


async def test_an_agent_that_may_be_asked_again_says_nothing() -> None:
    broker = FakeBroker()
    async with Swarm(broker) as swarm:
        await swarm.spawn("one")
        assert [request.next_use for request in broker.requests] == [None]
        assert not broker.steered


async def test_of_agents_that_are_mapped_nobody_is_waited_for() -> None:
    broker = FakeBroker()
    async with Swarm(broker) as swarm:
        await swarm.map(["one", "two"])
        await swarm.agents[0].ask("three")
    assert [request.next_use for request in broker.requests] == [math.inf, math.inf, None]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_swarm_whose_scope_ends_tells_that_nobody_comes_back(fails: bool) -> None:
    broker = FakeBroker()
    with suppress(KeyError):
        async with Swarm(broker, name="reviewers", tenant="t") as swarm:
            await swarm.spawn("one")
            if fails:
                raise KeyError("the user's own")
    assert broker.steered == [("", "reviewers", "t", math.inf)]


async def test_a_tool_keeps_the_conversation_while_it_runs() -> None:
    broker = FakeBroker()
    async with Swarm(broker) as swarm:
        agent = swarm.spawn("one", name="writer")
        await agent
        async with agent.tool(seconds=2.0):
            assert broker.pinned == {"writer": 2.0}
        assert not broker.pinned
        with suppress(KeyError):
            async with agent.tool():
                assert broker.pinned == {"writer": 5.0}
                raise KeyError("the tool's own")
        assert not broker.pinned


async def test_a_pin_that_is_refused_harms_nobody() -> None:
    broker = FakeBroker(lambda request: Reply("fine"))
    broker.refuses_pins = True
    async with Swarm(broker) as swarm:
        agent = swarm.spawn("one")
        await agent
        async with agent.tool():
            pass
        assert await agent.ask("two") == "fine"
