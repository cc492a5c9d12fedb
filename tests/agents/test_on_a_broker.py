"""Swarms on the real broker with a tiny random model: the shape of the program makes the hits."""

import threading

import anyio
import pytest

from mlx_swarm.agents import AgentFinished, Swarm
from mlx_swarm.broker import Broker
from mlx_swarm.broker.errors import AgentCancelled, ContextOverflow
from mlx_swarm.broker.request import Sampling

pytestmark = pytest.mark.anyio

MODEL = "synthetic:llama?layers=2&hidden=64&heads=2&context=2048"
INSTRUCTIONS = "You review code. Be brief, be kind, and name the line. " * 4


async def test_agents_share_their_instructions() -> None:
    async with (
        Broker(MODEL, ram=2**26) as broker,
        Swarm(broker, instructions=INSTRUCTIONS, max_tokens=4) as swarm,
    ):
        results = await swarm.map([f"Review file {number}." for number in range(6)])
        rendered = await broker.render(swarm.agents[0].messages[:2])
    (shared,) = rendered.boundaries
    own = sum(result.usage.prompt_tokens - shared for result in results)
    assert shared > 200
    assert results.usage.prefilled_tokens <= shared + own + 8
    assert results.usage.output_tokens <= 6 * 4


async def test_a_further_turn_prefills_what_is_new_and_nothing_else() -> None:
    async with (
        Broker(MODEL, ram=2**26) as broker,
        Swarm(broker, instructions=INSTRUCTIONS, max_tokens=8) as swarm,
    ):
        agent = swarm.spawn("Review this.")
        await agent
        for question in ("Why?", "And then?"):
            length = len(agent.tokens)
            await agent.ask(question)
            result = agent.turns[-1].result
            assert result is not None
            # The last generated token was never forwarded.
            assert result.usage.ram_tokens >= length - 1


async def test_a_cancelled_agent_leaves_the_others_alone() -> None:
    async with Broker(MODEL, ram=2**26) as broker:
        async with Swarm(broker, instructions=INSTRUCTIONS, max_tokens=64) as swarm:
            stopped, running = swarm.spawn("One."), swarm.spawn("Two.")
            async for event in swarm.events():
                if event.agent == stopped.name:
                    stopped.cancel()
            with pytest.raises(AgentCancelled):
                await stopped
            assert running.result is not None
            assert running.result.usage.output_tokens > 0
        finished = await broker.statistics()
    assert finished is not None


async def test_seeds_repeat_a_swarm_whatever_runs_beside_it() -> None:
    sampling = Sampling(temperature=1.0)

    async def tokens(broker: Broker, others: int) -> list[tuple[int, ...]]:
        async with Swarm(broker, seed=7, sampling=sampling, max_tokens=6, tenant="t") as swarm:
            agents = [swarm.spawn("Say something.", name=name) for name in "ab"]
            await swarm.map(["Something else."] * others)
            for agent in agents:
                await agent
            return [agent.tokens for agent in agents]

    async with Broker(MODEL, ram=2**26) as broker:
        first, second = await tokens(broker, 0), await tokens(broker, 3)
    assert first == second
    assert first[0] != first[1]


async def test_a_task_longer_than_the_context_fails_alone() -> None:
    async with Broker(MODEL, ram=2**26) as broker, Swarm(broker, max_tokens=4) as swarm:
        results = await swarm.map(["Short.", "word " * 3000])
    assert results[0].state == "finished"
    assert isinstance(results[1].error, ContextOverflow)


async def test_events_of_a_real_swarm_add_up_to_its_texts() -> None:
    async with Broker(MODEL, ram=2**26) as broker, Swarm(broker, max_tokens=12) as swarm:
        for number in range(3):
            swarm.spawn(f"Task {number}.")
        said: dict[str, str] = {}
        async for event in swarm.events():
            match event:
                case AgentFinished(agent=name, text=text):
                    assert said.get(name, "") == text
                case _ if text := getattr(event, "text", ""):
                    said[event.agent] = said.get(event.agent, "") + text
    assert len(said) == 3


async def test_a_broken_scope_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with anyio.CancelScope() as scope:
        async with Broker(MODEL, ram=2**26) as broker, Swarm(broker, max_tokens=500) as swarm:
            agents = [swarm.spawn(f"Task {number}.") for number in range(3)]
            await anext(agents[0].stream())
            scope.cancel()
            await anyio.sleep_forever()
    assert {thread for thread in threading.enumerate() if thread.name.startswith("mlx")} <= before
