"""Requests that wait, through the engine: its bounded queue, deadlines, and what the trace says."""

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from mlx_swarm.broker import (
    Completed,
    DeadlineExceeded,
    Delta,
    QueueFull,
    Request,
    ResponseStream,
)
from mlx_swarm.broker.engine.loop import EngineLoop
from mlx_swarm.broker.engine.memory import weight_bytes
from mlx_swarm.broker.trace import events
from tests.engine.driver import Driver
from tests.engine.test_shared import model_of
from tests.tiny_broker import SHARED, check_idle, inside, prompt, request, tiny

pytestmark = pytest.mark.anyio
BYTES_PER_TOKEN = 3 * 2 * 2 * 16 * 4


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


MakeDriver = Callable[..., Driver]


@pytest.fixture
def driver_at() -> Iterator[MakeDriver]:
    """Makes engines on a test's clock, and closes them."""
    made: list[Driver] = []

    def make(clock: Clock, **settings: Any) -> Driver:
        made.append(Driver(model_of("llama"), clock=clock, **settings))
        return made[-1]

    yield make
    for driver in made:
        driver.engine.close()


def test_one_request_too_many_is_refused_with_the_numbers_and_changes_nothing(
    driver_at: MakeDriver,
) -> None:
    driver = driver_at(Clock(), max_rows=2, max_queue=3)
    boxes = [driver.submit(request(agent)) for agent in range(5)]
    before = driver.engine.statistics()
    refused = [driver.submit(request(agent)) for agent in range(5, 8)]
    assert driver.engine.statistics() == before
    for box in refused:
        assert isinstance(box.error, QueueFull)
        assert "5 requests are open: 2 run at a time and 3 may wait" in str(box.error)
    driver.run()
    assert all(box.end for box in boxes)
    again = driver.submit(request(9))
    driver.run()
    assert again.end is not None
    driver.check_idle()


async def test_a_broker_takes_as_many_as_its_queue_is_long() -> None:
    async with tiny(max_rows=1, max_queue=1) as broker:
        streams = [broker.stream(request(agent, max_tokens=40)) for agent in range(4)]
        outcomes = [await outcome(stream) for stream in streams]
        await check_idle(broker)
    assert [type(each) for each in outcomes] == [Completed, Completed, QueueFull, QueueFull]


@pytest.mark.parametrize("turns", range(14))
def test_a_deadline_ends_a_request_in_any_state_and_leaves_nothing(
    turns: int, driver_at: MakeDriver
) -> None:
    clock = Clock()
    driver = driver_at(clock, max_rows=2, chunk=16)
    others = [driver.submit(request(agent, max_tokens=6)) for agent in range(2)]
    late = driver.submit(request(2, max_tokens=100, deadline=5.0))
    driver.run(turns)
    clock.now = 4.9
    driver.run(1)
    assert not late.over
    clock.now = 5.0
    driver.run(1)
    assert isinstance(late.error, DeadlineExceeded)
    assert "request-2 had 5 s; after 5 s it had computed " in str(late.error)
    driver.engine.check_integrity()
    driver.run()
    assert all(box.end for box in others)
    driver.check_idle()
    assert driver.engine.patience() == math.inf


def test_what_was_computed_before_the_deadline_serves_the_retry(driver_at: MakeDriver) -> None:
    clock = Clock()
    driver = driver_at(clock, chunk=16)
    late = driver.submit(request(0, max_tokens=100, deadline=5.0))
    driver.decode_all([late], 10)
    clock.now = 6.0
    driver.run()
    assert isinstance(late.error, DeadlineExceeded)
    assert "66 of 66 prompt tokens and 10 of at most 100 new ones" in str(late.error)
    retry = driver.submit(request(0, tokens=[*prompt(0), *late.tokens], max_tokens=1))
    driver.run()
    assert retry.end is not None
    assert retry.end.usage.ram_tokens >= len(prompt(0)) + 8
    driver.check_idle()


def test_a_deadline_that_is_over_before_the_engine_hears_of_it_is_refused(
    driver_at: MakeDriver,
) -> None:
    driver = driver_at(Clock())
    before = driver.engine.statistics()
    box = driver.submit(request(0, deadline=3.0), seconds_ago=3.0)
    assert isinstance(box.error, DeadlineExceeded)
    assert driver.engine.statistics() == before
    driver.check_idle()


async def test_an_idle_engine_wakes_up_for_a_deadline(
    tmp_path: Path, hold: threading.Event
) -> None:
    """Nothing is to be done while the disk is read, and no command comes."""
    async with tiny(cold=tmp_path) as broker:
        await broker.complete(request(0))
        await broker.flush()
    async with tiny(cold=tmp_path) as broker:
        with anyio.fail_after(10):
            error = await outcome(broker.stream(request(0, deadline=0.2)))
        assert isinstance(error, DeadlineExceeded)
        hold.set()
        assert isinstance(await outcome(broker.stream(request(0))), Completed)
        await check_idle(broker)


async def test_who_reads_gets_what_came_before_the_deadline_and_then_the_error() -> None:
    async with tiny() as broker:
        seen: list[Any] = []

        async def read() -> None:
            async for event in broker.stream(request(0, max_tokens=150, deadline=1e5)):
                seen.append(event)
                if isinstance(event, Delta):
                    await inside(broker, pass_time)

        with pytest.raises(DeadlineExceeded):
            await read()
        await check_idle(broker)
    assert any(isinstance(event, Delta) for event in seen)
    failed = [e for e in broker.recorder.events() if isinstance(e, events.Failed)]
    assert [e.error.split(":")[0] for e in failed] == ["DeadlineExceeded"]


def pass_time(engine: EngineLoop) -> None:
    """A day and more later."""
    clock = engine._recorder._clock
    engine._recorder._clock = lambda: clock() + 1e6


def test_a_new_agent_does_not_wait_behind_all_that_another_has_queued(
    driver_at: MakeDriver,
) -> None:
    driver = driver_at(Clock(), max_rows=1)
    for _ in range(6):
        driver.submit(request(0, tokens=prompt(0)[30:], max_tokens=3))
    driver.run(8)
    driver.submit(request(1, tokens=prompt(1)[20:], max_tokens=3))
    driver.run()
    admitted = [e.request for e in driver.recorder.events() if type(e) is events.Admitted]
    assert admitted.index("request-6") <= 2
    driver.check_idle()


def test_the_trace_says_who_waited_for_what(driver_at: MakeDriver) -> None:
    clock = Clock()
    model = model_of("llama")
    memory = weight_bytes(model) + 130 * BYTES_PER_TOKEN
    driver = driver_at(clock, max_rows=4, memory=memory, ram=0)
    fields: dict[str, Any] = {"tenant": "t", "swarm": "s", "max_tokens": 10, "priority": 2}
    for agent in range(3):
        driver.submit(request(agent, tokens=prompt(agent)[agent:], deadline=9.0, **fields))
    clock.now = 1.5
    driver.run()
    driver.check_idle()
    seen = driver.recorder.events()
    queued = [event for event in seen if type(event) is events.Queued]
    assert [event.others for event in queued] == [0, 1, 2]
    assert {(e.tenant, e.swarm, e.priority, e.deadline) for e in queued} == {("t", "s", 2, 9.0)}
    admitted = [event for event in seen if type(event) is events.Admitted]
    assert [event.request for event in admitted] == [f"request-{n}" for n in range(3)]
    assert [event.others for event in admitted] == [2, 1, 0]
    assert all(event.seconds == 1.5 and event.priority == 2 for event in admitted)
    assert admitted[0].tenant_tokens == 0 < admitted[1].tenant_tokens == admitted[1].swarm_tokens
    held = [event for event in seen if type(event) is events.Held]
    assert [(event.request, event.others) for event in held] == [("request-1", 1), ("request-2", 0)]
    assert all(
        event.need == (75 - n) * BYTES_PER_TOKEN > event.available for n, event in enumerate(held)
    )


def test_urgent_requests_go_first(driver_at: MakeDriver) -> None:
    driver = driver_at(Clock(), max_rows=1)
    for number, priority in enumerate([0, -3, 5, 0, 7]):
        driver.submit(Request(tokens=SHARED[number:], max_tokens=2, priority=priority))
    driver.run()
    admitted = [e.request for e in driver.recorder.events() if type(e) is events.Admitted]
    assert admitted == [f"request-{n}" for n in (4, 2, 0, 3, 1)]
    driver.check_idle()


async def outcome(stream: ResponseStream) -> Completed | Exception | None:
    """How a stream ends."""
    end = None
    try:
        async for event in stream:
            if isinstance(event, Completed):
                end = event
    except Exception as error:
        return error
    return end
