"""Mailboxes between a thread and an event loop, on asyncio and trio: nothing is lost."""

import random
import threading
from collections.abc import Sequence

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_swarm.broker.engine.mailbox import Courier, Mailbox
from mlx_swarm.broker.request import (
    Completed,
    Delta,
    RequestId,
    Started,
    StreamEvent,
    TokenLogprob,
    Usage,
)

pytestmark = pytest.mark.anyio
REQUEST = RequestId("r")


def _completed() -> Completed:
    return Completed(REQUEST, "", (), "stop", Usage(), 0.0)


async def _read(mailbox: Mailbox, into: list[StreamEvent]) -> None:
    while (event := await mailbox.receive()) is not None:
        into.append(event)


def _tokens(events: Sequence[StreamEvent]) -> list[int]:
    return [token for event in events if isinstance(event, Delta) for token in event.tokens]


async def test_one_crossing_wakes_all_readers_of_a_step() -> None:
    courier = Courier()
    crossings = 0
    schedule = courier._schedule

    def counted(deliver: object) -> None:
        nonlocal crossings
        crossings += 1
        schedule(deliver)  # type: ignore[arg-type]

    courier._schedule = counted
    mailboxes = [Mailbox(courier) for _ in range(20)]
    got: list[object] = []

    async def read(mailbox: Mailbox) -> None:
        got.append(await mailbox.receive())

    async with anyio.create_task_group() as group:
        for mailbox in mailboxes:
            group.start_soon(read, mailbox)
        await anyio.wait_all_tasks_blocked()
        for mailbox in mailboxes:
            mailbox.put(Delta(REQUEST, "a", (1,)))
        courier.flush()
    assert len(got) == 20
    assert crossings == 1


async def test_a_mailbox_keeps_order_and_merges_what_nobody_read() -> None:
    mailbox = Mailbox(Courier())
    mailbox.put(Started(REQUEST, 3, 1, 0))
    mailbox.put(Delta(REQUEST, "a", (1,)))
    mailbox.put(Delta(REQUEST, "", (2,)))
    mailbox.fail(ValueError("broken"))
    mailbox.put(_completed())
    assert await mailbox.receive() == Started(REQUEST, 3, 1, 0)
    assert await mailbox.receive() == Delta(REQUEST, "a", (1, 2))
    with pytest.raises(ValueError, match="broken"):
        await mailbox.receive()
    assert await mailbox.receive() is None


async def test_merged_deltas_keep_the_log_probability_of_each_token() -> None:
    mailbox = Mailbox(Courier())
    items = [TokenLogprob(token, -0.5 * token, ((token, -0.5 * token),)) for token in range(3)]
    for item in items:
        mailbox.put(Delta(REQUEST, "a", (item.token,), (item,)))
    assert await mailbox.receive() == Delta(REQUEST, "aaa", (0, 1, 2), tuple(items))
    mailbox.put(Delta(REQUEST, "b", (3,), (items[0],)))
    assert await mailbox.receive() == Delta(REQUEST, "b", (3,), (items[0],))


@given(st.lists(st.integers(0, 3)))
async def test_whenever_it_is_read_deltas_add_up_in_order(reads: list[int]) -> None:
    mailbox, got = Mailbox(Courier()), list[StreamEvent]()
    mailbox.put(Started(REQUEST, 1, 0, 0))
    put = 0
    for count in reads:
        for _ in range(count):
            mailbox.put(Delta(REQUEST, f"{put},", (put,)))
            put += 1
        if count != 1:
            event = await mailbox.receive() if mailbox._news else None
            got += [event] if event is not None else []
    mailbox.put(_completed())
    await _read(mailbox, got)
    assert [type(event) for event in (got[0], got[-1])] == [Started, Completed]
    deltas = [event for event in got if isinstance(event, Delta)]
    assert len(deltas) == len(got) - 2
    assert _tokens(got) == list(range(put))
    assert "".join(delta.text for delta in deltas) == "".join(f"{at}," for at in range(put))


@pytest.mark.parametrize("seed", range(4))
async def test_no_wake_up_is_lost_whatever_the_thread_does_meanwhile(seed: int) -> None:
    """The thread waits for what it sent last, at random times: a lost wake-up is a deadlock."""
    courier, chance = Courier(), random.Random(seed)
    mailboxes = [Mailbox(courier) for _ in range(8)]
    read: list[list[StreamEvent]] = [[] for _ in range(2 * len(mailboxes))]
    arrived = threading.Semaphore(0)

    async def receive(mailbox: Mailbox, into: list[StreamEvent]) -> None:
        while (event := await mailbox.receive()) is not None:
            into.append(event)
            for _ in event.tokens if isinstance(event, Delta) else ():
                arrived.release()

    def engine() -> int:
        sent = waited = 0
        for step in range(300):
            chosen = chance.sample(mailboxes, chance.randint(1, len(mailboxes)))
            sent += len(chosen)
            for mailbox in chosen:
                mailbox.put(Delta(REQUEST, "", (step,)))
                if chance.random() < 0.2:
                    courier.flush()
            courier.flush()
            if chance.random() < 0.5:
                continue
            for _ in range(sent - waited):
                assert arrived.acquire(timeout=60), "a wake-up was lost"
            waited = sent
        for mailbox in mailboxes:
            mailbox.put(_completed())
        courier.flush()
        return sent

    async with anyio.create_task_group() as group:
        for at, into in enumerate(read):  # two readers each
            group.start_soon(receive, mailboxes[at % len(mailboxes)], into)
        sent = await anyio.to_thread.run_sync(engine)
    for one, other in zip(read[:8], read[8:], strict=True):
        assert sum(isinstance(event, Completed) for event in [*one, *other]) == 1
        assert all(each == sorted(set(each)) for each in (_tokens(one), _tokens(other)))
        assert not set(_tokens(one)) & set(_tokens(other))
    assert sum(len(_tokens(each)) for each in read) == sent


async def test_a_reader_that_is_cancelled_takes_no_event_with_it() -> None:
    courier = Courier()
    mailbox, got = Mailbox(courier), list[StreamEvent]()
    scope = anyio.CancelScope()

    async def give_up() -> None:
        with scope:
            await _read(mailbox, got)

    async with anyio.create_task_group() as group:
        group.start_soon(give_up)
        group.start_soon(_read, mailbox, got)
        await anyio.wait_all_tasks_blocked()
        mailbox.put(Delta(REQUEST, "a", (1,)))
        courier.flush()
        scope.cancel()  # before or after the crossing: both are woken by it
        await anyio.wait_all_tasks_blocked()
        assert _tokens(got) == [1]
        mailbox.put(Delta(REQUEST, "b", (2,)))
        mailbox.put(_completed())
        courier.flush()
    assert _tokens(got) == [1, 2]
    assert isinstance(got[-1], Completed)


async def test_a_mailbox_can_be_read_after_its_only_reader_was_cancelled() -> None:
    courier = Courier()
    mailbox = Mailbox(courier)
    with anyio.move_on_after(0):
        await mailbox.receive()
    async with anyio.create_task_group() as group:
        got: list[StreamEvent] = []
        group.start_soon(_read, mailbox, got)
        await anyio.wait_all_tasks_blocked()
        mailbox.put(_completed())
        courier.flush()
    assert len(got) == 1
