"""The thread that owns MLX, and the way back from it, on asyncio and trio."""

import math
import os
import sys
import threading
import time

import anyio
import pytest

from mlx_swarm.broker.engine.mailbox import Mailbox
from mlx_swarm.broker.engine.thread import EngineThread
from mlx_swarm.broker.errors import BrokerClosed
from mlx_swarm.broker.request import Completed, Delta, RequestId, Usage

pytestmark = pytest.mark.anyio
REQUEST = RequestId("r")


class Counting:
    """A worker with `work` turns to do."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.work = self.turns = 0
        self.closed = False

    def turn(self) -> bool:
        self.turns += 1
        self.work = max(self.work - 1, 0)
        return self.work > 0

    def patience(self) -> float:
        return math.inf

    def close(self) -> None:
        assert threading.get_ident() == self.thread
        self.closed = True


def _completed() -> Completed:
    return Completed(REQUEST, "", (), "stop", Usage(), 0.0)


async def test_calls_run_in_the_thread_in_order_and_give_results() -> None:
    thread = EngineThread(Counting)
    await thread.start()
    seen: list[int] = []
    for number in range(5):
        thread.post(lambda worker, number=number: seen.append(number), lambda error: None)  # type: ignore[misc]
    owner = await thread.call(lambda worker: (worker.thread, threading.get_ident()))
    assert owner[0] == owner[1] != threading.get_ident()
    assert seen == [0, 1, 2, 3, 4]
    await thread.aclose()


async def test_a_call_raises_what_the_function_raised() -> None:
    thread = EngineThread(Counting)
    await thread.start()
    with pytest.raises(ZeroDivisionError):
        await thread.call(lambda worker: 1 // 0)
    assert await thread.call(lambda worker: 5) == 5
    await thread.aclose()


async def test_opening_that_fails_raises_here_and_leaves_no_thread() -> None:
    def broken() -> Counting:
        raise FileNotFoundError("no such model")

    thread = EngineThread(broken, name="opening-fails")
    with pytest.raises(FileNotFoundError, match="no such model"):
        await thread.start()
    assert "opening-fails" not in [each.name for each in threading.enumerate()]


async def test_closing_closes_the_worker_joins_the_thread_and_refuses_more() -> None:
    thread = EngineThread(Counting, name="closing")
    await thread.start()
    worker = await thread.call(lambda worker: worker)
    await thread.aclose()
    await thread.aclose()
    assert worker.closed
    if sys.platform == "linux":
        assert str(thread._thread.native_id) not in os.listdir("/proc/self/task")
    assert "closing" not in [each.name for each in threading.enumerate()]
    with pytest.raises(BrokerClosed):
        await thread.call(lambda worker: None)


async def test_commands_that_closing_overtakes_fail_as_closed() -> None:
    thread = EngineThread(Counting)
    await thread.start()
    entered, leave = threading.Event(), threading.Event()

    def hold(worker: Counting) -> None:
        entered.set()
        leave.wait(60)

    errors: list[BaseException] = []
    thread.post(hold, errors.append)
    thread.post(lambda worker: None, errors.append)
    assert entered.wait(60)
    async with anyio.create_task_group() as group:
        group.start_soon(thread.aclose)
        await anyio.wait_all_tasks_blocked()
        leave.set()
    assert [type(error) for error in errors] == [BrokerClosed]


async def test_cancelling_the_start_ends_the_thread() -> None:
    leave = threading.Event()

    def slow() -> Counting:
        leave.wait(60)
        return Counting()

    thread = EngineThread(slow, name="slow-start")
    async with anyio.create_task_group() as group:
        group.start_soon(thread.start)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
        leave.set()
    assert "slow-start" not in [each.name for each in threading.enumerate()]


async def test_the_engine_goes_on_while_the_loop_is_blocked() -> None:
    thread = EngineThread(Counting)
    await thread.start()
    mailbox = Mailbox(thread.courier)
    done = threading.Event()

    def produce(worker: Counting) -> None:
        for index in range(100):
            mailbox.put(Delta(REQUEST, "x", (index,)))
            thread.courier.flush()
        mailbox.put(_completed())
        done.set()

    thread.post(produce, mailbox.fail)
    assert done.wait(60)  # in the loop's thread: nothing can be delivered meanwhile
    event = await mailbox.receive()
    assert event == Delta(REQUEST, "x" * 100, tuple(range(100)))
    assert isinstance(await mailbox.receive(), Completed)
    assert await mailbox.receive() is None
    await thread.aclose()


def test_a_loop_that_died_takes_the_thread_with_it() -> None:
    kept: list[EngineThread[Counting]] = []

    async def leave_open() -> None:
        thread = EngineThread(Counting, name="orphan")
        await thread.start()
        kept.append(thread)

    anyio.run(leave_open)
    (thread,) = kept
    mailbox = Mailbox(thread.courier)
    thread.post(lambda worker: mailbox.put(_completed()), mailbox.fail)
    deadline = time.monotonic() + 60
    while "orphan" in [each.name for each in threading.enumerate()]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
