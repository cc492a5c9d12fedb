"""The Messages API as Anthropic's own client sees it, over a real model."""

from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from anthropic.types import MessageParam, ToolParam

from mlx_swarm.broker.server.messages.routes import routes
from tests.server.serving import SMOLLM2, serving

SYSTEM = "You are a careful assistant. Answer each question in one short sentence."
CAPITAL: list[MessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: ToolParam = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def client() -> Iterator[Anthropic]:
    """One server is enough: prompts of different tests share no more than instructions."""
    with (
        serving(SMOLLM2, routes=routes, ram="256MiB") as url,
        Anthropic(base_url=url, api_key="none", max_retries=0) as opened,
    ):
        yield opened


def _asked(**fields: Any) -> dict[str, Any]:
    given = {"model": SMOLLM2, "max_tokens": 16, "system": SYSTEM, "messages": CAPITAL}
    return {**given, **GREEDY, **fields}


def test_a_stream_adds_up_to_the_message(client: Anthropic) -> None:
    whole = client.messages.create(**_asked())
    with client.messages.stream(**_asked()) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()

    assert [block.type for block in whole.content] == ["text"]
    assert "Paris" in str(whole.content[0])
    assert whole.stop_reason == streamed.stop_reason == "end_turn"
    assert streamed.model == whole.model == SMOLLM2
    assert [block.model_dump(exclude={"parsed_output"}) for block in streamed.content] == [
        block.model_dump() for block in whole.content
    ]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert _prompt_tokens(streamed.usage) == _prompt_tokens(whole.usage)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert streamed.usage.cache_read_input_tokens == _prompt_tokens(whole.usage) - 1
    assert whole._request_id is not None


def test_counted_tokens_are_those_of_the_usage(client: Anthropic) -> None:
    for fields in ({}, {"tools": [WEATHER]}, {"messages": _begun("The capital")}):
        asked = _asked(**fields)
        counted = {name: asked[name] for name in asked if name not in ("max_tokens", "extra_body")}
        count = client.messages.count_tokens(**counted)
        reply = client.messages.create(**asked)
        assert count.input_tokens == _prompt_tokens(reply.usage)


def test_max_tokens_end_a_reply_and_none_computes_the_prompt_alone(client: Anthropic) -> None:
    short = client.messages.create(**_asked(max_tokens=2))
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 2)

    messages = [{"role": "user", "content": "Name a colour."}]
    warmed = client.messages.create(**_asked(messages=messages, max_tokens=0))
    assert (warmed.content, warmed.stop_reason) == ([], "max_tokens")
    assert warmed.usage.output_tokens == 0
    asked = client.messages.create(**_asked(messages=messages, max_tokens=1))
    assert asked.usage.cache_read_input_tokens == _prompt_tokens(warmed.usage) - 1


def test_a_stop_sequence_is_named_and_left_out(client: Anthropic) -> None:
    reply = client.messages.create(**_asked(stop_sequences=["nowhere", " Paris"]))
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", " Paris")
    assert _text(reply) == "The capital of France is"


def test_a_reply_goes_on_from_where_the_request_began_it(client: Anthropic) -> None:
    reply = client.messages.create(**_asked(messages=_begun("The capital of France")))
    assert _text(reply).startswith(" is Paris")


def test_marked_instructions_are_read_from_the_cache(client: Anthropic) -> None:
    system = [
        {
            "type": "text",
            "text": "You know all about trees, and you say it in few words.",
            "cache_control": {"type": "ephemeral"},
        }
    ]

    def ask(question: str) -> Any:
        messages = [{"role": "user", "content": question}]
        return client.messages.create(**_asked(system=system, messages=messages)).usage

    first, second = ask("How old do oaks get?"), ask("Where do pines grow?")
    assert first.cache_creation_input_tokens > 10
    marked = first.cache_creation_input_tokens + first.cache_read_input_tokens
    assert second.cache_creation_input_tokens == 0
    assert second.cache_read_input_tokens >= marked


def test_a_tool_is_called_and_its_result_answered(client: Anthropic) -> None:
    question: MessageParam = {"role": "user", "content": "How is the weather in Paris?"}
    tools = {"tools": [WEATHER], "max_tokens": 64}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    called = client.messages.create(**_asked(messages=[question], tool_choice=choice, **tools))
    with client.messages.stream(
        **_asked(messages=[question], tool_choice=choice, **tools)
    ) as stream:
        streamed = stream.get_final_message()

    assert called.stop_reason == streamed.stop_reason == "tool_use"
    [call] = called.content
    [same] = streamed.content
    assert call.type == same.type == "tool_use"
    assert (call.name, call.input) == ("weather", {"city": call.input["city"]})
    assert same.input == call.input
    assert call.input["city"] in ("Paris", "Rome")

    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny, 21 degrees."}
    conversation = [
        question,
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result, {"type": "text", "text": "Say it in one sentence."}]},
    ]
    reply = client.messages.create(
        **_asked(messages=conversation, tool_choice={"type": "none"}, **tools)
    )
    assert [block.type for block in reply.content] == ["text"]
    assert reply.usage.cache_read_input_tokens > _prompt_tokens(called.usage)


def test_text_of_a_given_format_is_that(client: Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "schema": schema}}
    reply = client.messages.create(**_asked(output_config=form, max_tokens=64))
    assert _text(reply).replace(" ", "").replace("\n", "") == '{"city":"Paris"}'


def _begun(text: str) -> list[MessageParam]:
    return [*CAPITAL, {"role": "assistant", "content": text}]


def _text(reply: Any) -> str:
    return "".join(block.text for block in reply.content)


def _prompt_tokens(usage: Any) -> int:
    return int(
        usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens
    )
