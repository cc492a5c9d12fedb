"""What waits for a client: bounded, merged, and nothing of a response lost or doubled."""

import json
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_swarm.broker.server.responses.events import (
    ArgumentsDelta,
    ReasoningDelta,
    ResponseEvent,
    TextDelta,
    TextDone,
)
from mlx_swarm.broker.server.responses.objects import Logprob
from mlx_swarm.broker.server.responses.outbox import Outbox, Source, Stalled

pytestmark = pytest.mark.anyio


class Client:
    """Takes messages while it is `open`."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.open = anyio.Event()

    async def send(self, text: str) -> None:
        await self.open.wait()
        self.messages.append(json.loads(text))


def text(number: int, delta: str = "x", item: str = "a", **fields: Any) -> TextDelta:
    return TextDelta(sequence_number=number, output_index=0, item_id=item, delta=delta, **fields)


def done(number: int, whole: str = "") -> TextDone:
    return TextDone(sequence_number=number, output_index=0, item_id="a", text=whole)


async def sent(outbox: Outbox, client: Client) -> list[dict[str, Any]]:
    """Everything that waits, once the client takes it."""
    client.open.set()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outbox.write)
        await outbox.drained()
        tasks.cancel_scope.cancel()
    outbox.check_integrity()
    assert outbox.bytes == 0
    return client.messages


async def test_deltas_of_one_item_that_wait_become_one_with_the_last_number() -> None:
    client, source = Client(), Source("lane")
    outbox = Outbox(client.send, 1 << 20, 10)
    probable = Logprob("b", -1.0, (98,))
    for event in (text(4, "a"), text(5, "b", logprobs=(probable,)), text(6, "c"), done(7, "abc")):
        await outbox.put(source, event)
    outbox.check_integrity()
    first, last = await sent(outbox, client)
    assert (first["sequence_number"], first["delta"], first["stream_id"]) == (6, "abc", "lane")
    assert [each["token"] for each in first["logprobs"]] == ["b"]
    assert (last["sequence_number"], last["stream_id"]) == (7, "lane")
    assert (outbox.merged, outbox.sent) == (2, 2)


async def test_only_deltas_of_the_same_part_of_the_same_source_are_merged() -> None:
    client = Client()
    outbox = Outbox(client.send, 1 << 20, 10)
    one, other = Source("1"), Source("2")
    events: list[tuple[Source, ResponseEvent]] = [
        (one, text(1)),
        (other, text(1)),
        (one, text(2, item="b")),
        (one, text(3, item="b", content_index=1)),
        (one, ReasoningDelta(sequence_number=4, output_index=0, item_id="b", delta="r")),
        (one, ArgumentsDelta(sequence_number=5, output_index=0, item_id="b", delta="{")),
        (one, ArgumentsDelta(sequence_number=6, output_index=0, item_id="b", delta="}")),
        (other, text(2)),
    ]
    for source, event in events:
        await outbox.put(source, event)
    messages = await sent(outbox, client)
    assert [(each["stream_id"], each["sequence_number"]) for each in messages] == [
        ("1", 1),
        ("2", 2),
        ("1", 2),
        ("1", 3),
        ("1", 4),
        ("1", 6),
    ]
    assert messages[-1]["delta"] == "{}"


async def test_a_delta_that_is_on_its_way_takes_no_more() -> None:
    client, source = Client(), Source()
    outbox = Outbox(client.send, 1 << 20, 10)
    await outbox.put(source, text(1, "a"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outbox.write)
        await anyio.wait_all_tasks_blocked()
        await outbox.put(source, text(2, "b"))
        client.open.set()
        await outbox.drained()
        tasks.cancel_scope.cancel()
    assert [each["delta"] for each in client.messages] == ["a", "b"]
    assert "stream_id" not in client.messages[0]


async def test_who_writes_waits_for_room() -> None:
    client = Client()
    outbox = Outbox(client.send, 2000, 10)

    async def write(source: Source) -> None:
        for number in range(50):
            await outbox.put(source, done(number, 100 * "x"))
            assert outbox.bytes <= 2000 + 400

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outbox.write)
        async with anyio.create_task_group() as writers:
            for name in "abc":
                writers.start_soon(write, Source(name))
            await anyio.wait_all_tasks_blocked()
            assert outbox.is_full
            outbox.check_integrity()
            client.open.set()
        await outbox.drained()
        tasks.cancel_scope.cancel()
    for name in "abc":
        numbers = [e["sequence_number"] for e in client.messages if e["stream_id"] == name]
        assert numbers == list(range(50))


async def test_a_client_that_takes_nothing_is_given_up() -> None:
    client = Client()
    outbox = Outbox(client.send, 100, 0.01)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outbox.write)
        for number in range(2):
            tasks.start_soon(outbox.put, Source(), done(number, 200 * "x"))
        with pytest.raises(Stalled):
            await outbox.watch()
        tasks.cancel_scope.cancel()


async def test_what_waits_below_the_bound_is_never_given_up() -> None:
    client = Client()
    outbox = Outbox(client.send, 1000, 0.001)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outbox.watch)
        await outbox.put(Source(), done(1))
        await anyio.sleep(0.01)
        assert not outbox.is_full
        tasks.cancel_scope.cancel()


async def test_trace_events_go_first_and_that_they_did_is_told() -> None:
    client, source = Client(), Source()
    outbox = Outbox(client.send, 4000, 10)
    for number in range(5):
        outbox.put_trace(b'{"trace":%d}' % number)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outbox.put, source, done(0, 5000 * "x"))
        await anyio.wait_all_tasks_blocked()
        outbox.put_trace(b'{"trace":5}')
        outbox.check_integrity()
        messages = await sent(outbox, client)
    assert messages[1:] == [{"type": "broker.trace.dropped", "count": 6}]
    outbox.put_trace(b'{"trace":6}')
    assert (await sent(outbox, client))[2:] == [{"trace": 6}]
    assert outbox.dropped == 6


async def test_trace_events_have_a_part_of_the_bound_and_come_last() -> None:
    client = Client()
    outbox = Outbox(client.send, 400, 10)
    for number in range(12):
        outbox.put_trace(b'{"trace":%2d}' % number)
    await outbox.put(Source(), done(0))
    messages = await sent(outbox, client)
    assert messages[0]["type"] == "response.output_text.done"
    assert messages[1:] == [
        *({"trace": n} for n in range(8)),
        {"type": "broker.trace.dropped", "count": 4},
    ]


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("tdrT"), st.booleans()), max_size=40))
def test_every_response_reads_the_same_however_it_is_merged(
    steps: list[tuple[int, str, bool]],
) -> None:
    async def run() -> None:
        client = Client()
        outbox = Outbox(client.send, 1 << 20, 10)
        sources = [Source(str(at)) for at in range(3)]
        expected: list[list[str]] = [[], [], []]
        for number, (at, kind, is_sent) in enumerate(steps):
            delta = chr(97 + number % 26)
            if kind == "d":
                await outbox.put(sources[at], done(number, delta))
            else:
                item = {"t": "a", "T": "b", "r": "a"}[kind]
                kinds = ReasoningDelta if kind == "r" else TextDelta
                event = kinds(sequence_number=number, output_index=0, item_id=item, delta=delta)
                await outbox.put(sources[at], event)
            expected[at] += [kind + delta]
            outbox.check_integrity()
            if is_sent:
                await sent(outbox, client)
        messages = await sent(outbox, client)
        for at in range(3):
            own = [each for each in messages if each["stream_id"] == str(at)]
            numbers = [each["sequence_number"] for each in own]
            assert numbers == sorted(set(numbers))
            assert "".join(str(each.get("delta", each.get("text"))) for each in own) == "".join(
                each[1] for each in expected[at]
            )

    anyio.run(run)
