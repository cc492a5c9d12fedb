"""The Responses API over WebSocket where clients are slow, drop, and come back."""

import json
import tracemalloc
from contextlib import suppress
from typing import Any

import anyio
import httpx
import pytest
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from mlx_swarm.broker.server.settings import ServerSettings
from mlx_swarm.broker.trace.events import Queued
from tests.server.sockets import (
    ENDS,
    Event,
    Running,
    answer,
    check_numbers,
    create,
    events,
    hear,
    running,
    say,
)

pytestmark = pytest.mark.anyio

LONG = "synthetic:llama?layers=1&hidden=32&heads=2&intermediate=64&context=4096&seed=3"
GREEDY: dict[str, Any] = {"temperature": 0, "logit_bias": {"257": -100, "258": -100, "256": -100}}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def deltas(found: list[Event]) -> str:
    """The text of the deltas."""
    return "".join(e["delta"] for e in found if e["type"] == "response.output_text.delta")


async def large(client: ClientConnection, lane: int) -> None:
    """Ask for a response whose events are long, by what is said about it."""
    await create(client, stream_id=str(lane), generate=False, metadata={"a": 100_000 * "x"})


def whole_of(found: list[Event]) -> list[Event]:
    """The events as they are where all deltas of an item are merged."""
    merged: list[Event] = []
    for event in found:
        before = merged[-1] if merged else {"type": ""}
        if event["type"] == before["type"] == "response.output_text.delta":
            merged[-1] = {**event, "delta": before["delta"] + event["delta"]}
        else:
            merged.append(event)
    return merged


async def no_reader(server: Running) -> ClientConnection:
    """A client whose system takes little, and which reads nothing."""
    client = await server.connect(max_queue=1, ping_interval=None)
    client.transport.pause_reading()
    return client


async def test_memory_is_bounded_for_a_client_that_never_reads() -> None:
    settings = ServerSettings(outbox_bytes=50_000, stall_seconds=60, max_lanes=8)
    async with running(LONG, settings=settings, max_rows=4) as server:
        client = await no_reader(server)
        before = after = 0
        tracemalloc.start()
        try:
            for burst in range(8):
                # Each of these events is told the client several times over.
                for number in range(40):
                    await create(
                        client,
                        stream_id=str(number % 8),
                        max_output_tokens=1,
                        instructions=4000 * "x",
                    )
                await anyio.sleep(0.05)
                size = tracemalloc.get_traced_memory()[0]
                before, after = (size, size) if burst == 1 else (before, size)
        finally:
            tracemalloc.stop()
            client.transport.abort()
        assert after - before < 6_000_000


async def test_a_client_that_never_reads_is_closed_and_the_others_do_not_wait() -> None:
    settings = ServerSettings(outbox_bytes=100_000, stall_seconds=0.2)
    async with running(settings=settings) as server, server.connect() as other:
        client = await no_reader(server)
        # More than what the systems on both sides take.
        async with anyio.create_task_group() as tasks:
            for number in range(60):
                tasks.start_soon(large, client, number)
            for _ in range(5):
                await answer(other)
        await server.check_idle()
        client.transport.resume_reading()
        with suppress(ConnectionClosed):
            async for _ in client:
                pass
        assert client.close_code == 1013
        await answer(other)


async def test_deltas_that_wait_are_merged_and_say_the_same() -> None:
    settings = ServerSettings(outbox_bytes=50_000_000)
    async with running(LONG, settings=settings) as server, server.connect() as client:
        fields: dict[str, Any] = {"max_output_tokens": 600, **GREEDY}
        await create(client, **fields)
        plain = await events(client)
        slow = await no_reader(server)
        for number in range(30):
            await large(slow, number)
        await create(slow, stream_id="slow", **fields)
        await server.check_idle(responses=32)
        slow.transport.resume_reading()
        merged = [await hear(slow)]
        while merged[-1].get("stream_id") != "slow" or merged[-1]["type"] not in ENDS:
            merged.append(await hear(slow))
        merged = [event for event in merged if event["stream_id"] == "slow"]
        check_numbers(merged)
        assert len(merged) < len(plain)
        assert deltas(merged) == deltas(plain)
        await slow.close()


async def test_who_comes_back_misses_nothing_and_gets_nothing_twice() -> None:
    async with running(LONG) as server:
        for keep in range(0, 40, 10):
            async with server.connect() as client:
                await create(client, max_output_tokens=12, **GREEDY)
                whole = await events(client)
                id = whole[0]["response"]["id"]
            kept = whole[:keep]
            after = kept[-1]["sequence_number"] if kept else -1
            async with server.connect() as client:
                await say(client, type="broker.resume", response_id=id, starting_after=after)
                rest = await events(client) if after < whole[-1]["sequence_number"] else []
            check_numbers(kept + rest)
            assert whole_of(kept + rest) == whole_of(whole)


@pytest.mark.parametrize("is_stored", [True, False])
async def test_who_drops_out_gets_the_rest_of_what_was_cancelled_then(is_stored: bool) -> None:
    async with running(LONG) as server:
        client = await server.connect()
        await create(client, max_output_tokens=3000, store=is_stored, **GREEDY)
        kept = [await hear(client) for _ in range(20)]
        client.transport.abort()
        await server.check_idle()
        async with server.connect() as again:
            id, after = kept[0]["response"]["id"], kept[-1]["sequence_number"]
            await say(
                again, type="broker.resume", response_id=id, starting_after=after, stream_id="r"
            )
            rest = await events(again)
        assert {event["stream_id"] for event in rest} == {"r"}
        check_numbers(kept + rest)
        last = rest[-1]["response"]
        assert last["status"] == "cancelled"
        assert deltas(kept + rest) == last["output"][0]["content"][0]["text"]


async def test_another_connection_follows_what_runs() -> None:
    async with running(LONG) as server, server.connect() as one, server.connect() as other:
        await create(one, max_output_tokens=200, store=False, **GREEDY)
        created = await hear(one)
        await say(other, type="broker.resume", response_id=created["response"]["id"])
        followed = await events(other)
        assert [e["sequence_number"] for e in followed] == list(range(len(followed)))
        assert deltas(followed) == deltas(await events(one))


async def test_events_that_are_gone_are_said_to_be_and_which_is_the_first() -> None:
    async with running(LONG, settings=ServerSettings(ring_events=8)) as server:
        async with server.connect() as client:
            await create(client, max_output_tokens=30, **GREEDY)
            whole = await events(client)
            id, last = whole[0]["response"]["id"], whole[-1]["sequence_number"]
            await say(client, type="broker.resume", response_id=id, starting_after=2)
            error = (await hear(client))["error"]
            assert (error["code"], error["param"]) == ("events_gone", "starting_after")
            assert str(last - 7) in error["message"]
            await say(client, type="broker.resume", response_id=id, starting_after=last - 8)
            rest = [event for event in whole if event["sequence_number"] > last - 8]
            assert whole_of(await events(client)) == whole_of(rest)


async def test_our_own_events_come_to_who_asked_and_are_ended() -> None:
    async with running() as server, server.connect() as one, server.connect() as other:
        await answer(other)
        await say(one, type="broker.subscribe", events=["trace", "statistics"])
        assert (await hear(one))["events"] == ["statistics", "trace"]
        await answer(other)
        await create(one)
        told = [await hear(one)]
        while told[-1].get("event", {}).get("event") != "Finished":
            told.append(await hear(one))
        trace = [each for each in told if each["type"] == "broker.trace"]
        assert {each["event"]["request"] for each in trace} == {"request-3"}
        assert trace[0]["event"]["event"] == "Queued"
        numbers = [each["number"] for each in trace]
        assert numbers == sorted(set(numbers))
        assert any(each["type"] == "broker.statistics" for each in told)
        await say(one, type="broker.unsubscribe")
        while told[-1]["type"] != "broker.subscribed":
            told.append(await hear(one))
        assert told[-1]["events"] == []
        await create(one)
        assert {event["type"].split(".")[0] for event in await events(one)} == {"response"}


async def test_each_lane_is_an_agent_unless_the_request_names_one() -> None:
    async with running() as server, server.connect() as client:
        first = await answer(client, stream_id="a")
        await answer(client, stream_id="b", previous_response_id=first["id"])
        await answer(client, stream_id="a")
        await answer(client, stream_id="a", prompt_cache_key="named")
        await answer(client, metadata={"agent": "known"})
        found = server.service.broker.recorder.events()
        agents = [event.agent for event in found if isinstance(event, Queued)]
        assert agents[0] == agents[2] != agents[1]
        assert [agent.rpartition("/")[2] for agent in agents] == ["a", "b", "a", "named", "known"]


async def test_what_waits_for_a_slow_client_reaches_it_before_the_end() -> None:
    settings = ServerSettings(outbox_bytes=50_000_000)
    async with running(settings=settings) as server:
        client = await no_reader(server)
        for number in range(60):
            await large(client, number)
        await server.check_idle(responses=60)
        server.service.draining.start()
        await anyio.sleep(0.05)
        client.transport.resume_reading()
        found = [json.loads(message) async for message in client]
        assert sum(event["type"] in ENDS for event in found) == 60
        assert client.close_code == 1001


async def test_turns_that_outlast_the_drain_are_told_to_have_ended() -> None:
    settings = ServerSettings(drain_seconds=0.05)
    fields = {"stream": True, "max_tokens": 4000, "min_tokens": 4000}
    messages = [{"role": "user", "content": "hi"}]
    async with (
        running(LONG, settings=settings) as server,
        server.connect() as client,
        httpx.AsyncClient() as http,
        http.stream(
            "POST", f"{server.url}/chat/completions", json={"messages": messages, **fields}
        ) as stream,
    ):
        lines = stream.aiter_lines()
        await anext(lines)
        await create(client, max_output_tokens=4000, min_tokens=4000)
        await hear(client)
        server.service.draining.start()
        assert [line async for line in lines if line][-1].startswith('data: {"error"')
        last = (await events(client))[-1]["response"]
        assert (last["status"], last["incomplete_details"]) == ("cancelled", None)
        await client.wait_closed()
        assert client.close_code == 1001
