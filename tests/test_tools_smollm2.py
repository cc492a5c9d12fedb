"""The real model calls the tool that it has to, though its chat template knows none."""

import json

import anyio
import pytest

from mlx_swarm.broker import (
    Broker,
    InvalidRequest,
    Message,
    ModelNotFound,
    NamedTool,
    Request,
    Tool,
)
from mlx_swarm.broker.models import CallPiece

pytestmark = pytest.mark.timeout(120)

CITY = {"type": "string", "maxLength": 12}
WEATHER = {"type": "object", "properties": {"city": CITY}, "required": ["city"]}
TOOLS = [
    Tool("get_weather", "The weather of a city.", {**WEATHER, "additionalProperties": False}),
    Tool("get_time", "The time of day."),
]


async def _ask() -> None:
    async with Broker("smollm2-135m", dtype="float32") as broker:
        question = Message("user", "What is the weather in Paris?")
        rendered = await broker.render([question], tools=TOOLS)
        assert await broker.decode(rendered.tokens) == rendered.text
        chat = broker.chat_format()
        reply = await broker.complete(
            Request(
                tokens=rendered.tokens,
                boundaries=rendered.boundaries,
                max_tokens=64,
                grammar=chat.grammar(TOOLS, NamedTool("get_weather"), parallel=False),
            )
        )
        assert reply.finish_reason == "stop"
        reader = chat.reader(TOOLS, rendered.text)
        [call] = [*reader.feed(reply.text), *reader.finish()]
        assert isinstance(call, CallPiece)
        assert call.name == "get_weather"
        assert list(json.loads(call.arguments)) == ["city"]
        with pytest.raises(InvalidRequest, match=r"token 49152 is outside .* 0 to 49151"):
            await broker.decode([49_152])
        with pytest.raises(InvalidRequest, match="a token is 'a'; it must be a token id"):
            await broker.decode(["a"])  # type: ignore[list-item]
        with pytest.raises(ModelNotFound, match="no model 'other'"):
            broker.chat_format("other")


def test_a_required_call_is_made_and_read() -> None:
    anyio.run(_ask)
