"""The Messages API as Anthropic's own client sees it, over a real model."""

from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from anthropic.types import MessageParam

from mlx_swarm.broker.server.messages.routes import routes
from tests.server.serving import SMOLLM2, serving

CAPITAL: list[MessageParam] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client() -> Iterator[Anthropic]:
    """One server is enough: what is cached here changes no text."""
    with (
        serving(SMOLLM2, routes=routes, ram="256MiB") as url,
        Anthropic(base_url=url, api_key="none", max_retries=0) as opened,
    ):
        yield opened


def _asked(**fields: Any) -> dict[str, Any]:
    given = {"model": SMOLLM2, "max_tokens": 12, "system": "Be brief.", "messages": CAPITAL}
    return {**given, "extra_body": {"temperature": 0}, **fields}


def test_a_stream_adds_up_to_the_message(client: Anthropic) -> None:
    whole = client.messages.create(**_asked())
    with client.messages.stream(**_asked()) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()

    assert "Paris" in _text(whole)
    assert _text(streamed) == _text(whole)
    assert whole.stop_reason == streamed.stop_reason == "end_turn"
    assert streamed.model == whole.model == SMOLLM2
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert streamed.usage.input_tokens == 1
    assert streamed.usage.cache_read_input_tokens == whole.usage.input_tokens - 1


def test_a_stop_sequence_is_named_and_left_out(client: Anthropic) -> None:
    reply = client.messages.create(**_asked(stop_sequences=["nowhere", " Paris"]))
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", " Paris")
    assert _text(reply).endswith(" is")


def test_a_reply_goes_on_from_where_the_request_began_it(client: Anthropic) -> None:
    begun: MessageParam = {"role": "assistant", "content": "The capital of"}
    reply = client.messages.create(**_asked(messages=[*CAPITAL, begun]))
    assert _text(reply).startswith(" France is Paris")


def _text(reply: Any) -> str:
    return "".join(block.text for block in reply.content)
