"""The Responses API over WebSocket, by raw clients: lanes, lineage, cancelling, what is wrong."""

import json
from typing import Any

import anyio
import pytest
from websockets.exceptions import ConnectionClosed

from mlx_swarm.broker.server.settings import ApiKey, ServerSettings
from tests.server.sockets import (
    ENDS,
    answer,
    check_numbers,
    create,
    events,
    hear,
    running,
    say,
    text_of,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_response_and_its_events() -> None:
    async with running() as server, server.connect() as client:
        await create(client, temperature=0)
        found = await events(client)
        kinds = [event["type"] for event in found]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.incomplete"
        check_numbers(found)
        assert not any("stream_id" in event for event in found)
        deltas = [e["delta"] for e in found if e["type"] == "response.output_text.delta"]
        assert "".join(deltas) == text_of(found[-1]["response"])
        await say(
            client,
            type="response.create",
            response={"input": "hi", "max_output_tokens": 6, "temperature": 0},
        )
        nested = (await events(client))[-1]["response"]
        assert text_of(nested) == text_of(found[-1]["response"])


async def test_lanes_go_side_by_side_and_one_lane_goes_in_order() -> None:
    async with running() as server, server.connect() as client:
        for number in range(12):
            await create(
                client, f"{number}", stream_id=f"lane {number % 4}", metadata={"n": str(number)}
            )
        found: dict[str, list[dict[str, Any]]] = {}
        ended = 0
        while ended < 12:
            event = await hear(client)
            found.setdefault(event["stream_id"], []).append(event)
            ended += event["type"] in ENDS
        for at in range(4):
            own = found[f"lane {at}"]
            turns = [e["response"] for e in own if e["type"] in ("response.created", *ENDS)]
            assert [int(turn["metadata"]["n"]) for turn in turns] == [
                at,
                at,
                at + 4,
                at + 4,
                at + 8,
                at + 8,
            ]


async def test_a_conversation_goes_on_and_forks_into_other_lanes() -> None:
    async with running() as server, server.connect() as client:
        first = await answer(client, "one", temperature=0)
        second = await answer(client, "two", temperature=0, previous_response_id=first["id"])
        assert second["usage"]["input_tokens"] > first["usage"]["total_tokens"]
        assert second["usage"]["input_tokens_details"]["cached_tokens"] > 0
        fork = await answer(
            client, "two", temperature=0, previous_response_id=first["id"], stream_id="fork"
        )
        assert text_of(fork) == text_of(second)


async def test_what_is_not_stored_is_continued_in_its_connection_only() -> None:
    async with running() as server:
        async with server.connect() as client:
            own = await answer(client, store=False)
            shared = await answer(client)
            again = await answer(client, previous_response_id=own["id"], store=False)
            await answer(client, previous_response_id=again["id"])
        async with server.connect() as client:
            await answer(client, previous_response_id=shared["id"])
            await create(client, previous_response_id=own["id"], stream_id="x")
            (error,) = await events(client)
            assert error["error"]["code"] == "previous_response_not_found"
            assert (error["status"], error["stream_id"]) == (400, "x")


async def test_a_failed_turn_evicts_nothing() -> None:
    async with running() as server, server.connect() as client:
        first = await answer(client, store=False)
        await create(client, 400 * "too long ", previous_response_id=first["id"], store=False)
        (error,) = await events(client)
        assert error["error"]["code"] == "context_length_exceeded"
        await answer(client, previous_response_id=first["id"])


async def test_a_prompt_can_be_warmed_up() -> None:
    async with running() as server, server.connect() as client:
        warm = await answer(client, "warm", generate=False)
        assert (warm["status"], warm["output"]) == ("completed", [])
        after = await answer(client, "warm")
        assert after["usage"]["input_tokens_details"]["cached_tokens"] > 0


async def test_what_runs_is_cancelled_by_its_id_by_its_lane_and_in_the_default_lane() -> None:
    async with running(max_rows=4) as server, server.connect() as client:
        for lane in ({"stream_id": "a"}, {"stream_id": "b"}, {}):
            await create(client, max_output_tokens=200, **lane)
            created = await hear(client)
            by = {"response_id": created["response"]["id"]} if lane == {"stream_id": "a"} else lane
            await say(client, type="response.cancel", **by)
            last = (await events(client))[-1]
            assert (last["type"], last["response"]["status"]) == (
                "response.incomplete",
                "cancelled",
            )
            assert last.get("stream_id") == lane.get("stream_id")


async def test_what_waits_in_the_queue_is_cancelled_at_once() -> None:
    async with running(max_rows=1) as server, server.connect() as client:
        await create(client, max_output_tokens=200, stream_id="runs")
        assert (await hear(client))["stream_id"] == "runs"
        await create(client, stream_id="waits")
        await say(client, type="response.cancel", stream_id="waits")
        await say(client, type="response.cancel", stream_id="runs")
        status: dict[str, str] = {}
        while len(status) < 2:
            event = await hear(client)
            if event["type"] in ENDS:
                status[event["stream_id"]] = event["response"]["status"]
        assert status == {"runs": "cancelled", "waits": "cancelled"}


async def test_another_connection_of_the_tenant_can_cancel_what_is_stored() -> None:
    async with running() as server, server.connect() as one, server.connect() as other:
        await create(one, max_output_tokens=200)
        id = (await hear(one))["response"]["id"]
        await say(other, type="response.cancel", response_id=id)
        assert (await events(one))[-1]["response"]["status"] == "cancelled"


WRONG: list[tuple[Any, str | None]] = [
    ("{", None),
    ("[1]", None),
    ('"text"', None),
    ("{}", "type"),
    ({"type": 1}, "type"),
    ({"type": "response.steer", "previous_response_id": "resp_1", "input": "x"}, "type"),
    ({"type": "response.unknown"}, "type"),
    ({"type": "response.create", "stream_id": 7}, "stream_id"),
    ({"type": "response.create", "stream_id": 300 * "x"}, "stream_id"),
    ({"type": "response.create", "input": 7}, "input"),
    ({"type": "response.create", "input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ({"type": "response.create", "input": "x", "background": True}, "background"),
    ({"type": "response.create", "response": 7}, None),
    ({"type": "response.cancel"}, "stream_id"),
    ({"type": "response.cancel", "response_id": "resp_none"}, "response_id"),
    ({"type": "response.cancel", "response_id": 7}, "response_id"),
    ({"type": "broker.subscribe", "events": ["secrets"]}, "events[0]"),
    ({"type": "broker.resume", "response_id": "r", "starting_after": "x"}, "starting_after"),
    (b'{"type":"response.create"}', "type"),
    ("[" * 100_000, None),
    ('{"type":"response.create","input":"\\ud800"}', None),
]


async def test_what_is_wrong_is_said_and_the_connection_lives() -> None:
    async with running() as server, server.connect() as client:
        for message, param in WRONG:
            plain = message if isinstance(message, str | bytes) else json.dumps(message)
            await client.send(plain)
            error = await hear(client)
            assert error["type"] == "error", message
            assert error["status"] == 400, (message, error)
            assert error["error"]["type"] == "invalid_request_error"
            assert error["error"]["message"]
            assert error["error"]["param"] == param, (message, error)
        await answer(client, stream=True, stream_options={"include_obfuscation": False}, nonsense=1)


async def test_a_resume_of_nothing_is_not_found() -> None:
    async with running() as server, server.connect() as client:
        await say(client, type="broker.resume", response_id="resp_none", stream_id="x")
        error = await hear(client)
        assert (error["status"], error["stream_id"]) == (404, "x")


async def test_text_that_is_none_and_messages_that_are_too_long_end_the_connection() -> None:
    async with running(settings=ServerSettings(max_body=10_000)) as server:
        async with server.connect() as client:
            await client.send(b"\xff\xfe", text=True)
            with pytest.raises(ConnectionClosed) as raised:
                await client.recv()
            assert raised.value.rcvd is not None
            assert raised.value.rcvd.code == 1007
        async with server.connect() as client:
            await client.send(20_000 * "x")
            with pytest.raises(ConnectionClosed) as raised:
                await client.recv()
            assert raised.value.rcvd is not None
            assert raised.value.rcvd.code == 1009


async def test_more_lanes_than_may_be_are_refused_and_the_others_go_on() -> None:
    async with running(settings=ServerSettings(max_lanes=8)) as server, server.connect() as client:
        for number in range(100):
            await create(client, stream_id=str(number), max_output_tokens=100)
        ended: set[str] = set()
        refused: set[str] = set()
        while len(ended) + len(refused) < 100:
            event = await hear(client)
            if event["type"] == "error":
                assert event["status"] == 429
                assert event["error"]["headers"]["retry-after"]
                refused.add(event["stream_id"])
            elif event["type"] in ENDS:
                ended.add(event["stream_id"])
        assert refused
        assert {str(number) for number in range(8)} <= ended
        await answer(client, stream_id="99")


async def test_any_number_of_lanes_may_follow_one_another() -> None:
    settings = ServerSettings(max_lanes=2)
    async with running(settings=settings) as server, server.connect() as client:
        for number in range(100):
            await create(client, stream_id=str(number), max_output_tokens=1, generate=False)
            assert (await events(client))[-1]["type"] == "response.completed"


async def test_clients_of_different_tenants_see_nothing_of_each_other() -> None:
    keys = (ApiKey("key-one", "one"), ApiKey("key-two", "two"))
    async with (
        running(settings=ServerSettings(api_keys=keys)) as server,
        server.connect(key="key-one") as one,
        server.connect(key="key-two") as two,
    ):
        await say(two, type="broker.subscribe", events=["trace"], scope="tenant")
        assert (await hear(two))["type"] == "broker.subscribed"
        first = await answer(one, "the same words", store=True)
        for event in (
            {"type": "response.create", "input": "x", "previous_response_id": first["id"]},
            {"type": "response.cancel", "response_id": first["id"]},
            {"type": "broker.resume", "response_id": first["id"]},
        ):
            await say(two, **event)
            assert (await hear(two))["type"] == "error"
        second = await answer(two, "the same words")
        assert second["usage"]["input_tokens_details"]["cached_tokens"] == 0
        told = await events(two, ["broker.trace"])
        while told[-1]["event"]["event"] != "Finished":
            told.append(await hear(two))
        assert {each["event"].get("request") for each in told} <= {"request-2", None}


async def test_a_draining_server_ends_what_runs_and_starts_nothing() -> None:
    async with running() as server, server.connect() as client:
        await create(client, max_output_tokens=100, stream_id="runs")
        assert (await hear(client))["type"] == "response.created"
        server.service.draining.start()
        await create(client, stream_id="late")
        ends = {event["stream_id"]: event for event in map(json.loads, [m async for m in client])}
        assert client.close_code == 1001
        assert ends["runs"]["type"] in ENDS[:2]
        assert (ends["late"]["status"], ends["late"]["error"]["code"]) == (503, "draining")


async def test_connections_that_drop_at_any_moment_leave_nothing() -> None:
    async with running(max_rows=4) as server:

        async def come_and_go(number: int) -> None:
            client = await server.connect()
            try:
                for lane in range(number % 3):
                    await create(client, f"{number}", stream_id=str(lane), max_output_tokens=60)
                for _ in range(number % 7):
                    if number % 3:
                        await hear(client)
            finally:
                if number % 2:
                    client.transport.abort()
                else:
                    await client.close()

        for start in range(0, 200, 20):
            async with anyio.create_task_group() as tasks:
                for number in range(start, start + 20):
                    tasks.start_soon(come_and_go, number)
        await server.check_idle()
