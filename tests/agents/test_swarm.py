"""A swarm's scope: what it starts, what it waits for, what it cancels, and what it reports."""

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from mlx_swarm.agents import (
    AgentDelta,
    AgentFailed,
    AgentFinished,
    AgentStarted,
    AgentStopped,
    Swarm,
    SwarmEvent,
)
from mlx_swarm.agents.swarm import CONCURRENCY
from mlx_swarm.broker.engine.submission import MAX_QUEUE
from mlx_swarm.broker.errors import (
    AgentCancelled,
    ContextOverflow,
    EngineFailed,
    InvalidRequest,
    SwarmClosed,
)
from mlx_swarm.broker.request import Grammar, Request, Sampling, Usage
from tests.agents.fake_broker import FakeBroker, Reply, user_text
from tests.tiny_broker import tiny

pytestmark = pytest.mark.anyio


def echo(request: Request) -> Reply:
    """Answer with the task in capitals; a task that begins with fail fails after some words."""
    text = user_text(request)
    if text.startswith("fail"):
        return Reply("so far", error=EngineFailed(f"{text}: the step failed"))
    return Reply(text.upper())


async def test_map_keeps_the_order_of_its_tasks() -> None:
    async with Swarm(FakeBroker(echo)) as swarm:
        results = await swarm.map(["a longer task", "b", "cc"])
    assert results.values() == ["A LONGER TASK", "B", "CC"]
    assert [result.agent for result in results] == ["agent-1", "agent-2", "agent-3"]
    assert results[0].state == "finished"
    assert results.usage == swarm.usage


async def test_map_of_nothing_is_nothing() -> None:
    async with Swarm(FakeBroker()) as swarm:
        assert (await swarm.map([])).values() == []


async def test_values_raise_a_group_of_the_failures_and_the_others_keep_their_results() -> None:
    async with Swarm(FakeBroker(echo)) as swarm:
        results = await swarm.map(["one", "fail 2", "three", "fail 4"])
    with pytest.raises(ExceptionGroup, match="2 of 4 agents failed") as caught:
        results.values()
    assert [str(error) for error in caught.value.exceptions] == [
        "fail 2: the step failed",
        "fail 4: the step failed",
    ]
    assert caught.value.exceptions[0].__notes__ == ["turn 0 of agent 'agent-2'"]
    assert (results[0].value, results[2].value) == ("ONE", "THREE")
    assert [result.text for result in results.failed] == ["so far", "so far"]


async def test_usage_adds_up_with_failed_and_cancelled_agents() -> None:
    gate = anyio.Event()
    broker = FakeBroker(lambda r: Reply("slow", gate=gate) if "slow" in user_text(r) else echo(r))
    async with Swarm(broker) as swarm:
        await swarm.map(["one", "fail"])
        slow = swarm.spawn("slow")
        await anext(slow.stream())
        slow.cancel()
    assert slow.result is not None
    assert slow.result.text in ("s", "sl")
    prompts = [len(request.tokens) for request in broker.requests]
    assert swarm.usage.requests == 3
    assert swarm.usage.prompt_tokens == sum(prompts)
    assert swarm.usage.output_tokens == len("ONE") + 1 + len("so far") + len(slow.result.text)
    assert swarm.usage == sum((agent.usage for agent in swarm.agents), Usage())
    spent = swarm.usage
    assert spent.prompt_tokens == spent.ram_tokens + spent.cold_tokens + spent.prefilled_tokens


async def test_instructions_lead_every_prompt_and_their_end_is_marked() -> None:
    broker = FakeBroker()
    async with Swarm(broker, instructions="Be brief.") as swarm:
        await swarm.map(["one", "two"])
    first, second = broker.requests
    (boundary,) = first.boundaries
    assert first.tokens[:boundary] == second.tokens[:boundary]
    assert first.tokens[boundary + 1] != second.tokens[boundary + 1]
    assert second.boundaries == first.boundaries


async def test_requests_carry_the_names_and_the_settings_of_their_swarm() -> None:
    broker = FakeBroker()
    sampling, digits = Sampling(temperature=0.5), Grammar(regex="[0-9]+")
    swarm = Swarm(
        broker,
        name="review",
        max_tokens=9,
        stop=["\n"],
        tenant="t",
        sampling=sampling,
        priority=-2,
        deadline=60,
        grammar=digits,
        cache=False,
    )
    async with swarm:
        await swarm.spawn("one", name="editor")
        answer = Grammar(choice=["yes", "no"])
        await swarm.spawn(
            "two",
            max_tokens=3,
            stop=[],
            sampling=Sampling(),
            grammar=answer,
            priority=4,
            deadline=0.5,
        )
    first, second = broker.requests
    assert (first.agent, first.swarm, first.tenant, first.cache) == ("editor", "review", "t", False)
    assert (first.max_tokens, first.stop, first.sampling) == (9, ("\n",), sampling)
    assert (first.priority, first.deadline) == (-2, 60)
    assert (second.max_tokens, second.stop, second.sampling) == (3, (), Sampling())
    assert (second.priority, second.deadline) == (4, 0.5)
    assert (first.grammar, second.grammar) == (digits, answer)


async def test_seeds_follow_from_the_swarm_the_name_and_the_turn() -> None:
    async def seeds(seed: int | None, names: list[str]) -> list[int | None]:
        broker = FakeBroker()
        async with Swarm(broker, seed=seed, sampling=Sampling(temperature=1.0)) as swarm:
            for name in names:
                agent = swarm.spawn("go", name=name)
                await agent
                await agent.ask("go on")
        return [request.sampling.seed for request in broker.requests]

    first = await seeds(7, ["a", "b"])
    assert len(set(first)) == 4
    assert await seeds(7, ["b", "a"]) == first[2:] + first[:2]
    assert set(await seeds(8, ["a", "b"])).isdisjoint(first)
    assert await seeds(None, ["a"]) == [None, None]


async def test_a_seed_in_the_sampling_is_derived_from_too() -> None:
    broker = FakeBroker()
    async with Swarm(broker, sampling=Sampling(temperature=1.0, seed=7)) as swarm:
        await swarm.map(["same", "same"])
    first, second = (request.sampling.seed for request in broker.requests)
    assert None not in (first, second)
    assert first != second


async def test_no_more_turns_are_with_the_broker_than_the_cap_allows() -> None:
    broker = FakeBroker(echo)
    async with Swarm(broker, concurrency=3) as swarm:
        results = await swarm.map([f"task {n}" for n in range(20)])
    assert broker.most_open == 3
    assert len(results.values()) == 20


async def test_without_a_cap_all_agents_run_at_once() -> None:
    broker = FakeBroker(echo)
    async with Swarm(broker) as swarm:
        await swarm.map(["the same task"] * 64)
    assert broker.most_open == 64


async def test_events_of_all_agents_are_merged_and_end_when_all_are_over() -> None:
    gate = anyio.Event()
    broker = FakeBroker(lambda r: Reply("slow", gate=gate) if "slow" in user_text(r) else echo(r))
    seen: list[SwarmEvent] = []
    async with Swarm(broker) as swarm:
        swarm.spawn("hi", name="good")
        swarm.spawn("fail", name="bad")
        slow = swarm.spawn("slow", name="stopped")
        async for event in swarm.events():
            seen.append(event)
            match event:
                case AgentDelta(agent="stopped"):
                    slow.cancel()
    of = {
        name: [type(event) for event in seen if event.agent == name]
        for name in ("good", "bad", "stopped")
    }
    assert of["good"] == [AgentStarted, AgentDelta, AgentDelta, AgentFinished]
    assert of["bad"] == [AgentStarted, *[AgentDelta] * 6, AgentFailed]
    assert (of["stopped"][0], of["stopped"][-1]) == (AgentStarted, AgentStopped)
    finished = next(event for event in seen if isinstance(event, AgentFinished))
    failed = next(event for event in seen if isinstance(event, AgentFailed))
    assert (finished.text, finished.finish_reason, finished.ttft_seconds) == ("HI", "stop", 0.5)
    assert failed.error == "EngineFailed: fail: the step failed"
    assert failed.usage.output_tokens == 6


async def test_events_reach_every_listener_and_a_dropped_one_is_forgotten() -> None:
    async with Swarm(FakeBroker(echo)) as swarm:
        swarm.spawn("one")
        dropped = swarm.events()
        await anext(dropped)
        del dropped
        first, second = swarm.events(), swarm.events()
        assert [event async for event in first] == [event async for event in second]


async def test_who_listens_before_the_first_turn_hears_of_it() -> None:
    seen: list[SwarmEvent] = []

    async def listen(swarm: Swarm) -> None:
        seen.extend([event async for event in swarm.events()])

    async with anyio.create_task_group() as tasks, Swarm(FakeBroker(echo)) as swarm:
        tasks.start_soon(listen, swarm)
        await anyio.wait_all_tasks_blocked()
        await swarm.map(["one"])
    assert isinstance(seen[0], AgentStarted)
    assert isinstance(seen[-1], AgentFinished)


async def test_who_listens_to_a_swarm_without_turns_is_released_at_its_end() -> None:
    async with anyio.create_task_group() as tasks:
        async with Swarm(FakeBroker()) as swarm:
            tasks.start_soon(anext, swarm.events(), None)
            await anyio.wait_all_tasks_blocked()


async def test_events_of_an_idle_swarm_end_at_once() -> None:
    async with Swarm(FakeBroker()) as swarm:
        await swarm.map(["one"])
        assert [event async for event in swarm.events()] == []


async def test_leaving_the_scope_waits_for_running_agents() -> None:
    async with Swarm(FakeBroker(echo)) as swarm:
        agent = swarm.spawn("one")
        assert agent.result is None
    assert await agent == "ONE"


async def test_an_error_in_the_scope_cancels_the_agents_and_comes_out_as_it_is() -> None:
    broker = FakeBroker(lambda request: Reply("never", gate=anyio.Event()))
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with Swarm(broker) as swarm:
            agent = swarm.spawn("one")
            waiting = swarm.spawn("two")
            await anext(agent.stream())
            raise ZeroDivisionError
    assert broker.open == 0
    for stopped in (agent, waiting):
        with pytest.raises(AgentCancelled):
            await stopped


async def test_cancelling_the_surrounding_scope_leaves_nothing_running() -> None:
    broker = FakeBroker(lambda request: Reply("never", gate=anyio.Event()))
    with anyio.CancelScope() as surrounding:
        async with Swarm(broker) as swarm:
            agents = [swarm.spawn(f"task {n}") for n in range(5)]
            await anext(agents[4].stream())
            surrounding.cancel()
            await swarm.map(["another"])
    assert surrounding.cancelled_caught
    assert broker.open == 0
    states = [agent.result.state for agent in swarm.agents if agent.result]
    assert states == ["cancelled"] * len(swarm.agents)


@pytest.mark.parametrize("checkpoints", range(0, 40, 3))
async def test_cancelling_at_any_await_leaves_nothing_open(checkpoints: int) -> None:
    broker = FakeBroker(echo)

    async def cancel_later(scope: anyio.CancelScope) -> None:
        for _ in range(checkpoints):
            await anyio.lowlevel.checkpoint()
        scope.cancel()

    with anyio.CancelScope() as surrounding:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancel_later, surrounding)
            async with Swarm(broker, concurrency=2) as swarm:
                for number in range(4):
                    swarm.spawn(f"task {number}").ask("and then?")
                async for _ in swarm.events():
                    pass
                await swarm.map(["fail", "one more"])
    assert broker.open == 0
    assert all(turn.result for agent in swarm.agents for turn in agent.turns)
    assert [event async for event in swarm.events()] == []


async def test_five_hundred_agents_run_in_one_swarm() -> None:
    async with Swarm(FakeBroker(echo), concurrency=32) as swarm:
        results = await swarm.map([str(number) for number in range(500)])
    assert results.values() == [str(number) for number in range(500)]


async def test_cancelling_a_map_cancels_its_agents_only() -> None:
    gate = anyio.Event()
    broker = FakeBroker(lambda request: Reply("late", gate=gate))
    async with Swarm(broker) as swarm:
        other = swarm.spawn("one")
        with anyio.CancelScope() as around_map:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(swarm.map, ["two", "three"])
                await anyio.wait_all_tasks_blocked()
                around_map.cancel()
        gate.set()
        assert await other == "late"
    assert [agent.result.state for agent in swarm.agents if agent.result] == [
        "finished",
        "cancelled",
        "cancelled",
    ]


async def test_two_swarms_share_one_broker() -> None:
    broker = FakeBroker(echo)
    async with Swarm(broker, name="x") as first, Swarm(broker, name="y") as second:
        one, two = first.spawn("one"), second.spawn("two")
        assert (await one, await two) == ("ONE", "TWO")
    assert {request.swarm for request in broker.requests} == {"x", "y"}


async def test_names_are_given_and_skip_those_taken() -> None:
    async with Swarm(FakeBroker()) as swarm:
        swarm.spawn("one", name="agent-1")
        assert [swarm.spawn("two").name, swarm.spawn("three").name] == ["agent-2", "agent-3"]


async def test_the_broker_refusing_a_prompt_is_that_agents_error() -> None:
    def refuse(request: Request) -> Reply:
        raise ContextOverflow("prompt of 9,120 tokens; the context is 8,192")

    async with Swarm(FakeBroker(refuse)) as swarm:
        agent = swarm.spawn("one")
        with pytest.raises(ContextOverflow, match="9,120"):
            await agent


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda swarm: swarm.spawn(""), "task is empty"),
        (lambda swarm: swarm.spawn(" \n"), "task is empty"),
        (lambda swarm: swarm.spawn("again", name="taken"), "the name 'taken' is taken"),
        (lambda swarm: swarm.spawn("x", name=""), "name is empty"),
    ],
)
async def test_misuse_is_refused_and_changes_nothing(
    misuse: Callable[[Swarm], object], message: str
) -> None:
    async with Swarm(FakeBroker()) as swarm:
        swarm.spawn("first", name="taken")
        with pytest.raises(InvalidRequest, match=message):
            misuse(swarm)
    assert [agent.name for agent in swarm.agents] == ["taken"]


@pytest.mark.parametrize("tasks", ["one task", ["fine", ""]])
async def test_a_map_is_refused_as_a_whole(tasks: list[str]) -> None:
    broker = FakeBroker()
    async with Swarm(broker) as swarm:
        with pytest.raises(InvalidRequest):
            await swarm.map(tasks)
    assert (swarm.agents, broker.requests) == ((), [])


async def test_a_swarm_is_used_inside_its_scope() -> None:
    swarm = Swarm(FakeBroker())
    with pytest.raises(SwarmClosed, match="before its scope"):
        swarm.spawn("early")
    async with swarm:
        agent = swarm.spawn("one")
    with pytest.raises(SwarmClosed, match="after its scope"):
        swarm.spawn("late")
    with pytest.raises(SwarmClosed, match="'agent-1' was asked after"):
        agent.ask("late")
    with pytest.raises(SwarmClosed, match="one scope"):
        await swarm.__aenter__()


def test_a_concurrency_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="concurrency is 0"):
        Swarm(FakeBroker(), concurrency=0)


async def test_a_later_agent_hits_what_an_earlier_one_left() -> None:
    broker = FakeBroker()
    async with Swarm(broker, instructions="Be brief.") as swarm:
        await swarm.spawn("one")
        second = swarm.spawn("two")
        await second
    (boundary,) = broker.requests[0].boundaries
    assert second.usage.ram_tokens == boundary + 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"concurrency": 0}, "concurrency is 0"),
        ({"concurrency": 1.5}, "concurrency is 1.5"),
        ({"instructions": 5}, "instructions is 5"),
        ({"instructions": "\ud800"}, "lone surrogate"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"sampling": None}, "must be a Sampling"),
        ({"grammar": "a*"}, "must be a Grammar"),
        ({"stop": "END"}, "stop is 'END'; it must be a list of texts"),
        ({"stop": [5]}, "stop string is 5"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"tenant": None}, "tenant is None"),
        ({"cache": "no"}, "cache is 'no'"),
        ({"priority": 11}, "priority is 11"),
        ({"deadline": 0}, "deadline is 0"),
    ],
)
def test_a_setting_that_no_turn_could_run_with_is_refused_at_once(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        Swarm(FakeBroker(), **settings)


async def test_wrong_kinds_of_tasks_and_names_are_refused_at_once() -> None:
    async with Swarm(FakeBroker()) as swarm:
        for arguments, said in (
            ({"task": None}, "the task is None; it must be text"),
            ({"task": "one", "name": 5}, "name is 5; it must be text"),
            ({"task": "one", "stop": "END"}, "stop is 'END'"),
            ({"task": "one", "max_tokens": "x"}, "max_tokens is 'x'"),
        ):
            with pytest.raises(InvalidRequest, match=said):
                swarm.spawn(**arguments)
        for tasks in (None, "one task", ["one", None]):
            with pytest.raises(InvalidRequest):
                await swarm.map(tasks)  # type: ignore[arg-type]
        assert swarm.agents == ()


async def test_results_and_deltas_carry_log_probabilities_where_the_swarm_asks_for_them() -> None:
    broker = FakeBroker(echo)
    async with Swarm(broker, logprobs=True, top_logprobs=2) as swarm:
        events = swarm.events()
        results = await swarm.map(["one", "fail"])
        deltas = [event async for event in events if isinstance(event, AgentDelta)]
    assert [(each.logprobs, each.top_logprobs) for each in broker.requests] == [(True, 2)] * 2
    assert [len(result.logprobs) for result in results] == [len("ONE") + 1, len("so far")]
    assert [len(item.top) for item in results[0].logprobs] == [2] * 4
    assert all([item.token for item in delta.logprobs] == [*delta.tokens] for delta in deltas)
    async with Swarm(broker) as swarm:
        assert (await swarm.map(["one"]))[0].logprobs == ()
    with pytest.raises(InvalidRequest, match="top_logprobs is 2"):
        Swarm(broker, top_logprobs=2)


async def test_more_turns_than_a_broker_lets_wait_wait_in_the_swarm() -> None:
    async with (
        tiny(max_rows=4, max_queue=2) as broker,
        Swarm(broker, concurrency=6, max_tokens=1) as swarm,
    ):
        results = await swarm.map([f"task {number}" for number in range(40)])
    assert len(results.values()) == 40


def test_two_swarms_fit_into_the_queue_of_a_broker() -> None:
    assert 2 * CONCURRENCY <= MAX_QUEUE
