"""The Messages API as Anthropic's own client sees it, where it does not matter what is said."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from anthropic.types import MessageParam, ToolParam

from mlx_swarm.broker.server.messages.routes import routes
from tests.server.serving import serving
from tests.tiny_broker import TINY

MODEL = TINY.replace("context=256", "context=2048")
QUESTION: MessageParam = {"role": "user", "content": "How is the weather in Paris?"}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: ToolParam = {"name": "weather", "description": "Of a city", "input_schema": CITY}


@pytest.fixture(scope="module")
def client() -> Iterator[Anthropic]:
    """One server for all of them."""
    with (
        serving(MODEL, routes=routes) as url,
        Anthropic(base_url=url, api_key="none", max_retries=0) as opened,
    ):
        yield opened


def _asked(**fields: Any) -> dict[str, Any]:
    given = {"model": MODEL, "max_tokens": 4, "messages": [QUESTION]}
    return {**given, "extra_body": {"temperature": 0}, **fields}


def test_counted_tokens_are_those_of_the_usage(client: Anthropic) -> None:
    begun = [QUESTION, {"role": "assistant", "content": "It is"}]
    forms: list[dict[str, Any]] = [{}, {"tools": [WEATHER]}, {"messages": begun}, {"system": "Hi."}]
    counts = set()
    for fields in forms:
        asked = _asked(**fields)
        counted = {name: asked[name] for name in asked if name not in ("max_tokens", "extra_body")}
        count = client.messages.count_tokens(**counted).input_tokens
        assert count == _prompt_tokens(client.messages.create(**asked).usage)
        counts.add(count)
    assert len(counts) == len(forms)


def test_max_tokens_end_a_reply_and_none_computes_the_prompt_alone(client: Anthropic) -> None:
    messages = [{"role": "user", "content": "Name a colour."}]
    warmed = client.messages.create(**_asked(messages=messages, max_tokens=0))
    assert (warmed.content, warmed.stop_reason) == ([], "max_tokens")
    assert warmed.usage.output_tokens == 0
    asked = client.messages.create(**_asked(messages=messages, max_tokens=2))
    assert asked.usage.cache_read_input_tokens == _prompt_tokens(warmed.usage) - 1
    assert (asked.stop_reason, asked.usage.output_tokens) == ("max_tokens", 2)
    assert asked._request_id is not None


def test_more_tokens_than_the_context_has_are_as_many_as_it_has(client: Anthropic) -> None:
    messages = [{"role": "user", "content": "x" * 1900}]
    grammar = {"type": "json_schema", "schema": {"type": "string", "minLength": 10_000}}
    reply = client.messages.create(
        **_asked(
            messages=messages,
            output_config={"format": grammar},
            extra_body={"max_tokens": 10**30},
        )
    )
    assert reply.stop_reason == "max_tokens"
    assert _prompt_tokens(reply.usage) + reply.usage.output_tokens == 2048


def test_marked_instructions_are_read_from_the_cache(client: Anthropic) -> None:
    def ask(question: str, mark: bool) -> Any:
        text = {"type": "text", "text": "You know all about trees, and say it in few words."}
        system = [{**text, "cache_control": {"type": "ephemeral"}} if mark else text]
        messages = [{"role": "user", "content": question}]
        return client.messages.create(**_asked(system=system, messages=messages)).usage

    first, second = ask("How old do oaks get?", True), ask("Where do pines grow?", True)
    assert first.cache_creation_input_tokens > 50
    assert second.cache_creation_input_tokens == 0
    marked = first.cache_creation_input_tokens + first.cache_read_input_tokens
    assert second.cache_read_input_tokens >= marked
    assert ask("Are ferns trees?", False).cache_creation_input_tokens == 0


def test_a_marked_message_is_the_end_of_what_is_created(client: Anthropic) -> None:
    block = {
        "type": "text",
        "text": "Once there was a fox.",
        "cache_control": {"type": "ephemeral"},
    }
    messages = [
        {"role": "user", "content": [block]},
        {"role": "assistant", "content": "And then?"},
        {"role": "user", "content": "It ran into the wood and was never seen again."},
    ]
    usage = client.messages.create(**_asked(messages=messages)).usage
    assert usage.cache_creation_input_tokens > 20
    assert usage.input_tokens > 60


def test_a_tool_is_called_and_its_result_answered(client: Anthropic) -> None:
    forced = _asked(
        tools=[WEATHER],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_tokens=200,
    )
    called = client.messages.create(**forced)
    with client.messages.stream(**forced) as stream:
        streamed = stream.get_final_message()

    assert called.stop_reason == streamed.stop_reason == "tool_use"
    [call], [same] = called.content, streamed.content
    assert isinstance(call, anthropic.types.ToolUseBlock)
    assert isinstance(same, anthropic.types.ToolUseBlock)
    assert (call.name, call.input) == (same.name, same.input)
    assert call.name == "weather"
    assert call.input["city"] in ("Paris", "Rome")

    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny, 21 degrees."}
    conversation = [
        QUESTION,
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result, {"type": "text", "text": "Say it in one word."}]},
    ]
    reply = client.messages.create(
        **_asked(messages=conversation, tools=[WEATHER], tool_choice={"type": "none"})
    )
    assert reply.stop_reason == "max_tokens"
    assert reply.usage.cache_read_input_tokens > _prompt_tokens(called.usage)


def test_text_of_a_given_format_is_that(client: Anthropic) -> None:
    form = {"format": {"type": "json_schema", "schema": {"enum": ["Paris", "Rome"]}}}
    reply = client.messages.create(**_asked(output_config=form, max_tokens=20))
    [block] = reply.content
    assert isinstance(block, anthropic.types.TextBlock)
    assert block.text in ('"Paris"', '"Rome"')
    assert reply.stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("fields", "kind", "said"),
    [
        ({"model": "nobody"}, anthropic.NotFoundError, "nobody"),
        (
            {"extra_body": {"max_tokens": "many"}},
            anthropic.BadRequestError,
            "max_tokens: Expected `int`",
        ),
        ({"max_tokens": -1}, anthropic.BadRequestError, "max_tokens"),
        ({"messages": []}, anthropic.BadRequestError, "messages: at least one"),
        ({"stop_sequences": [""]}, anthropic.BadRequestError, "stop strings"),
        ({"metadata": {"user_id": 7}}, anthropic.BadRequestError, "metadata.user_id"),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "tool_choice"),
        ({"extra_body": {"temperature": -1}}, anthropic.BadRequestError, "temperature"),
        (
            {"messages": [{"role": "user", "content": "x" * 3000}]},
            anthropic.BadRequestError,
            r"prompt is too long: 30\d\d tokens > 2047 maximum",
        ),
    ],
)
def test_what_is_wrong_is_an_error_of_its_class_that_says_what(
    client: Anthropic, fields: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        client.messages.create(**_asked(**fields))
    with pytest.raises(kind, match=said):
        client.messages.create(**_asked(stream=True, **fields))


def _prompt_tokens(usage: Any) -> int:
    return int(
        usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens
    )
