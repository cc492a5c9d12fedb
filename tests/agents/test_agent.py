"""An agent's turns: waited for, streamed, asked further, cancelled, failed."""

import anyio
import pytest

from mlx_swarm.agents import Swarm
from mlx_swarm.broker.errors import AgentCancelled, EngineFailed, InvalidRequest
from mlx_swarm.broker.request import Message, Request
from tests.agents.fake_broker import END, FakeBroker, Reply, characters, user_text

pytestmark = pytest.mark.anyio


def fail_on_request(text: str) -> FakeBroker:
    """A broker that echoes, and fails where the user says `text`."""

    def answer(request: Request) -> Reply:
        asked = user_text(request)
        return Reply(asked.upper(), error=EngineFailed("broken") if asked == text else None)

    return FakeBroker(answer)


async def test_a_turn_is_streamed_from_its_beginning_by_any_number_of_readers() -> None:
    gate = anyio.Event()
    async with Swarm(FakeBroker(lambda request: Reply("four", gate=gate))) as swarm:
        agent = swarm.spawn("go")
        early = agent.stream()
        assert await anext(early) + await anext(early) == "fo"
        gate.set()
        assert [piece async for piece in early] == ["u", "r"]
        assert "".join([piece async for piece in agent.stream()]) == await agent == "four"


async def test_tokens_without_text_make_no_piece() -> None:
    async with Swarm(FakeBroker(lambda request: Reply("a~b"))) as swarm:
        agent = swarm.spawn("go")
        assert [piece async for piece in agent.stream()] == ["a", "b"]


async def test_a_stream_raises_what_ended_the_turn_after_what_it_said() -> None:
    async with Swarm(fail_on_request("go")) as swarm:
        said = ""
        with pytest.raises(EngineFailed, match="broken"):  # noqa: PT012
            async for piece in swarm.spawn("go").stream():
                said += piece
    assert said == "GO"


async def test_a_further_turn_continues_the_tokens_of_the_turn_before() -> None:
    broker = fail_on_request("")
    async with Swarm(broker, instructions="Be brief.") as swarm:
        agent = swarm.spawn("one")
        assert await agent == "ONE"
        assert await agent.ask("two") == "TWO"
        assert await agent == "TWO"
        assert await agent.ask("three") == "THREE"
    first, second, third = (request.tokens for request in broker.requests)
    rendered = await broker.render(
        [
            Message("system", "Be brief."),
            *(Message("user", "one"), Message("assistant", "ONE")),
            *(Message("user", "two"), Message("assistant", "TWO")),
            Message("user", "three"),
        ]
    )
    assert list(third) == rendered.tokens
    assert second[: len(first)] == first
    assert third[: len(second) + 4] == (*second, *characters("TWO"), END)
    assert [request.boundaries for request in broker.requests] == [rendered.boundaries] * 3
    assert agent.messages[-1] == Message("assistant", "THREE")


async def test_a_further_turn_hits_the_cache_up_to_the_last_token_that_was_forwarded() -> None:
    broker = fail_on_request("")
    async with Swarm(broker) as swarm:
        agent = swarm.spawn("one")
        await agent
        before = agent.usage
        await agent.ask("two")
    first, _second = broker.requests
    assert agent.usage.ram_tokens - before.ram_tokens == len(first.tokens) + len("ONE")
    assert [turn.result.turn for turn in agent.turns if turn.result] == [0, 1]


async def test_turns_asked_ahead_run_one_after_another() -> None:
    broker = fail_on_request("")
    async with Swarm(broker) as swarm:
        agent = swarm.spawn("one")
        second, third = agent.ask("two"), agent.ask("three")
        assert [await third, await second] == ["THREE", "TWO"]
        assert agent.result is third.result
    assert broker.most_open == 1
    assert [user_text(request) for request in broker.requests] == ["one", "two", "three"]


async def test_a_failed_turn_ends_the_agent_and_the_turns_behind_it() -> None:
    broker = fail_on_request("two")
    async with Swarm(broker) as swarm:
        agent = swarm.spawn("one")
        second, third = agent.ask("two"), agent.ask("three")
        with pytest.raises(EngineFailed, match="broken"):
            await third
        with pytest.raises(EngineFailed, match="broken"):
            agent.ask("four")
        assert second.result is not None
        assert (second.result.state, second.result.text) == ("failed", "TWO")
    assert len(broker.requests) == 2
    assert agent.messages[-1] == Message("assistant", "ONE")


async def test_cancelling_ends_running_and_waiting_turns() -> None:
    broker = FakeBroker(lambda request: Reply("never", gate=anyio.Event()))
    async with Swarm(broker) as swarm:
        agent = swarm.spawn("one")
        waiting = agent.ask("two")
        await anext(agent.turns[0].stream())
        agent.cancel()
        for turn in (agent.turns[0], waiting):
            with pytest.raises(AgentCancelled, match="'agent-1' was cancelled"):
                await turn
        with pytest.raises(AgentCancelled):
            agent.ask("three")
        agent.cancel()
    assert broker.open == 0
    assert agent.result is not None
    assert agent.result.state == "cancelled"


async def test_an_agent_cancelled_before_it_began_asks_the_broker_nothing() -> None:
    broker = FakeBroker()
    async with Swarm(broker) as swarm:
        agent = swarm.spawn("one")
        agent.cancel()
        with pytest.raises(AgentCancelled):
            await agent
    assert broker.requests == []
    assert swarm.usage.requests == 0


async def test_an_agent_cancelled_while_it_waits_for_room_gives_its_place_away() -> None:
    gate = anyio.Event()
    broker = FakeBroker(lambda request: Reply("late", gate=gate))
    async with Swarm(broker, concurrency=1) as swarm:
        agents = [swarm.spawn(f"task {n}") for n in range(3)]
        await anyio.wait_all_tasks_blocked()
        running = broker.requests[0].agent
        waiting = [agent for agent in agents if agent.name != running]
        waiting[0].cancel()
        gate.set()
        assert await waiting[1] == "late"


async def test_cancelling_after_the_end_changes_nothing() -> None:
    async with Swarm(FakeBroker()) as swarm:
        agent = swarm.spawn("one")
        await agent
        agent.cancel()
        assert await agent == "ok"
        assert await agent.ask("two") == "ok"


async def test_cancelling_one_who_waits_leaves_the_agent_running() -> None:
    gate = anyio.Event()
    async with Swarm(FakeBroker(lambda request: Reply("late", gate=gate))) as swarm:
        agent = swarm.spawn("one")
        with anyio.CancelScope() as scope:
            scope.cancel()
            await agent
        gate.set()
        assert await agent == "late"


async def test_a_response_without_an_end_is_an_error() -> None:
    async with Swarm(FakeBroker(lambda request: Reply("half", finish_reason=None))) as swarm:
        agent = swarm.spawn("one")
        with pytest.raises(EngineFailed, match="before it was complete"):
            await agent


async def test_a_response_that_the_broker_cancelled_is_a_cancelled_turn() -> None:
    broker = FakeBroker(lambda request: Reply("half", finish_reason="cancelled"))
    async with Swarm(broker) as swarm:
        agent = swarm.spawn("one")
        with pytest.raises(AgentCancelled):
            await agent
    assert agent.usage.output_tokens == 4
    assert agent.messages == ()


async def test_an_empty_question_is_refused() -> None:
    async with Swarm(FakeBroker()) as swarm:
        agent = swarm.spawn("one")
        with pytest.raises(InvalidRequest, match="empty"):
            agent.ask("")
    assert len(agent.turns) == 1


async def test_a_handle_says_what_it_is() -> None:
    async with Swarm(FakeBroker()) as swarm:
        agent = swarm.spawn("one", name="editor")
        assert repr(agent) == "<Agent 'editor', 1 turns, running>"
        await agent
        assert repr(agent) == "<Agent 'editor', 1 turns, finished>"
