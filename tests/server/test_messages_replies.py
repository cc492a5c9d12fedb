"""Turns as replies of the Messages API: the events of a stream add up to the reply."""

import json
from collections.abc import AsyncIterator
from typing import Any, cast

import msgspec
import pytest

from mlx_swarm.broker.errors import EngineFailed
from mlx_swarm.broker.request import Usage
from mlx_swarm.broker.server.errors import ApiError
from mlx_swarm.broker.server.messages.replies import ReplyBuilder, marked_length
from mlx_swarm.broker.server.messages.routes import _frames
from mlx_swarm.broker.server.messages.turns import Marks
from mlx_swarm.broker.server.turns.generation import Generation
from mlx_swarm.broker.server.turns.histories import Prompt
from mlx_swarm.broker.server.turns.turn import (
    Began,
    Call,
    Caller,
    Ended,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    TurnEvent,
)

USAGE = Usage(requests=1, prompt_tokens=30, ram_tokens=8, cold_tokens=4, output_tokens=5)


def _ended(reason: FinishReason = "stop", **fields: Any) -> Ended:
    given: dict[str, Any] = {
        "finish_reason": reason,
        "text": "",
        "reasoning": "",
        "calls": (),
        "usage": USAGE,
        "ttft_seconds": 0.1,
        "stop_sequence": None,
        "prompt": (1,) * 30,
        "tokens": (1, 2, 3, 4, 5),
    }
    return Ended(**{**given, **fields})


def _builder(marked: int = 0) -> ReplyBuilder:
    return ReplyBuilder("msg_1", "m", 30, marked)


def _taken(builder: ReplyBuilder, *events: TurnEvent) -> list[dict[str, Any]]:
    taken = [each for event in events for each in builder.take(event)]
    return cast(list[dict[str, Any]], json.loads(msgspec.json.encode(taken)))


def test_thoughts_text_and_calls_are_blocks_in_their_order() -> None:
    builder = _builder()
    events = _taken(
        builder,
        Began(30, 8, 4),
        ReasoningDelta("H"),
        ReasoningDelta("m."),
        TextDelta("I "),
        TextDelta("call."),
        Call("call_1", "f", '{"a": 1}'),
        Call("call_2", "g", "{}"),
        _ended("tool_calls"),
    )
    reply = json.loads(msgspec.json.encode(builder.reply))
    assert reply["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "I call."},
        {"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "call_2", "name": "g", "input": {}},
    ]
    assert reply["stop_reason"] == "tool_use"
    assert [
        (event["type"], event.get("index")) for event in events if "start" in event["type"]
    ] == [("content_block_start", number) for number in range(4)]
    deltas = [event["delta"]["type"] for event in events if event["type"].endswith("block_delta")]
    assert deltas == [
        *["thinking_delta", "thinking_delta", "signature_delta"],
        *["text_delta", "text_delta", "input_json_delta", "input_json_delta"],
    ]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]


@pytest.mark.parametrize(
    ("ended", "stop"),
    [
        (_ended("stop"), ("end_turn", None)),
        (_ended("length"), ("max_tokens", None)),
        (_ended("stop", stop_sequence="x"), ("stop_sequence", "x")),
        (_ended("tool_calls", stop_sequence="x"), ("tool_use", None)),
        (_ended("stop", tokens=()), ("max_tokens", None)),
    ],
)
def test_why_it_ended(ended: Ended, stop: tuple[str, str | None]) -> None:
    builder = _builder()
    _taken(builder, ended)
    assert (builder.reply.stop_reason, builder.reply.stop_sequence) == stop


def test_a_turn_that_the_server_ended_is_an_error() -> None:
    with pytest.raises(ApiError) as refused:
        _builder().take(_ended("cancelled"))
    assert refused.value.status == 503


@pytest.mark.parametrize(("marked", "created"), [(0, 0), (10, 0), (12, 0), (20, 8), (29, 17)])
def test_the_parts_of_a_prompt_add_up(marked: int, created: int) -> None:
    builder = _builder(marked)
    _taken(builder, _ended())
    usage = builder.reply.usage
    assert usage.cache_creation_input_tokens == created
    assert usage.cache_read_input_tokens == 12
    assert usage.input_tokens == 18 - created


@pytest.mark.parametrize(
    ("marks", "boundaries", "length"),
    [
        ("none", (10, 20), 0),
        ("instructions", (10, 20), 10),
        ("messages", (10, 20), 20),
        ("messages", (), 0),
    ],
)
def test_the_length_that_is_marked(marks: Marks, boundaries: tuple[int, ...], length: int) -> None:
    assert marked_length(Prompt((1,) * 30, boundaries, "", Caller()), marks) == length


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("error", "kind"), [(EngineFailed("a step failed"), "api_error"), (KeyError("x"), "api_error")]
)
async def test_what_fails_in_a_stream_is_its_last_event(error: Exception, kind: str) -> None:
    class Failing:
        async def __aiter__(self) -> AsyncIterator[TurnEvent]:
            yield TextDelta("So ")
            raise error

    frames: list[str] = []
    raised: list[Exception] = []
    try:
        async for each in _frames(cast(Generation, Failing()), _builder(), "req_1"):
            frames.append(each.decode())  # noqa: PERF401
    except KeyError as other:
        raised.append(other)
    name, data = frames[-1].strip().split("\n")
    assert name == "event: error"
    told = json.loads(data.removeprefix("data: "))
    assert (told["type"], told["error"]["type"], told["request_id"]) == ("error", kind, "req_1")
    # What nobody foresaw goes on to where it is logged, and its text to nobody else.
    assert raised == ([error] if isinstance(error, KeyError) else [])
