"""From a request's body to messages and a turn: what is taken, and how the rest is refused."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_swarm.broker.grammar import Grammar
from mlx_swarm.broker.messages import Message, NamedTool, ToolCall
from mlx_swarm.broker.server.bodies import decode
from mlx_swarm.broker.server.errors import ApiError
from mlx_swarm.broker.server.responses.conversations import conversation, input_messages
from mlx_swarm.broker.server.responses.items import input_items
from mlx_swarm.broker.server.responses.objects import Item
from mlx_swarm.broker.server.responses.turns import response_of, turn_of
from mlx_swarm.broker.server.responses.wire import CreateResponse
from mlx_swarm.broker.server.settings import ServerSettings
from mlx_swarm.broker.server.turns.turn import Caller, Conversation, Turn

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}


def nothing(id: str) -> Item | None:
    return None


def messages(*items: dict[str, Any]) -> list[Message]:
    return input_messages(input_items(list(items), nothing))


def turn(body: dict[str, Any] | bytes) -> Turn:
    """What `start_run` makes of a body without a server."""
    data = body if isinstance(body, bytes) else json.dumps({"input": "hi", **body})
    request = decode(CreateResponse, data)
    request.check()
    items = input_items(request.input, nothing)
    response_of(request, "m", ServerSettings())
    said = conversation(request.instructions, (), items)
    return turn_of(request, said, Caller(), ServerSettings())


def refused(body: dict[str, Any] | bytes) -> ApiError:
    with pytest.raises(ApiError) as error:
        turn(body)
    return error.value


def test_a_text_is_a_message_of_the_user() -> None:
    asked = turn({"input": "hi", "instructions": "be brief"}).prompt
    assert isinstance(asked, Conversation)
    assert asked.messages == (Message("system", "be brief"), Message("user", "hi"))


def test_messages_may_be_short_or_in_parts() -> None:
    assert messages(
        {"role": "developer", "content": "a"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [
                {"type": "output_text", "text": "c", "annotations": []},
                {"type": "refusal", "refusal": "d"},
            ],
        },
    ) == [Message("developer", "a"), Message("user", "b"), Message("assistant", "cd")]


def test_what_a_model_did_in_one_go_is_one_message() -> None:
    assert messages(
        {"role": "user", "content": "q"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"role": "assistant", "content": "a"},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "r"},
        {
            "type": "function_call_output",
            "call_id": "2",
            "output": [{"type": "input_text", "text": "s"}],
        },
        {"type": "function_call", "call_id": "3", "name": "f", "arguments": "{}"},
    ) == [
        Message("user", "q"),
        Message(
            "assistant",
            "a",
            tool_calls=(ToolCall("1", "f", "{}"), ToolCall("2", "g", "{}")),
            reasoning="t",
        ),
        Message("tool", "r", tool_call_id="1"),
        Message("tool", "s", tool_call_id="2"),
        Message("assistant", tool_calls=(ToolCall("3", "f", "{}"),)),
    ]


def test_two_answers_of_an_assistant_stay_two() -> None:
    assert messages(
        {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}
    ) == [Message("assistant", "a"), Message("assistant", "b")]


def test_a_summary_stands_for_reasoning_that_is_missing() -> None:
    summary = [{"type": "summary_text", "text": "short"}]
    item = {"type": "reasoning", "id": "rs_1", "summary": summary, "encrypted_content": "x"}
    assert messages(item, {"role": "assistant", "content": "a"}) == [
        Message("assistant", "a", reasoning="short")
    ]


def test_a_reference_is_the_item_it_names() -> None:
    known = {"type": "message", "id": "msg_1", "role": "user", "content": "found"}
    found = input_items([{"type": "item_reference", "id": "msg_1"}], {"msg_1": known}.get)
    assert input_messages(found) == [Message("user", "found")]


IMAGE = {"type": "input_image", "image_url": "data:"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [3]}, "input[0]"),
        (
            {"input": [{"role": "user", "content": "a"}, {"type": "web_search_call"}]},
            "input[1].type",
        ),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "msg_9"}]}, "input[0].id"),
        ({"input": [{"type": "function_call_output", "output": 1}]}, "input[0].output"),
        (
            {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}]},
            "input",
        ),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"seed": 1.5}, "seed"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, {"type": "function"}]}, "tools[1].name"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], param: str) -> None:
    error = refused(body)
    assert (error.status, error.type, error.param) == (400, "invalid_request_error", param)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 5000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    assert refused(body).status == 400


def test_null_is_as_good_as_absent() -> None:
    names = set(CreateResponse.__struct_fields__) - {"input"}
    plain = turn({})
    assert turn(dict.fromkeys(names)) == plain
    assert turn({"some_new_field": {"a": 1}}) == plain


def test_settings_reach_the_turn() -> None:
    asked = turn(
        {
            "max_output_tokens": 7,
            "temperature": 0.5,
            "top_k": 3,
            "seed": 9,
            "stop": "end",
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "reasoning": {"effort": "none"},
            "text": {"format": {"type": "json_object"}},
            "generate": False,
        }
    )
    assert isinstance(asked.prompt, Conversation)
    assert (asked.max_tokens, asked.stop, asked.generate) == (7, ("end",), False)
    assert (asked.sampling.temperature, asked.sampling.top_k, asked.sampling.seed) == (0.5, 3, 9)
    assert (asked.logprobs, asked.top_logprobs) == (True, 2)
    assert asked.grammar == Grammar(json_schema={"type": "object"})
    assert asked.prompt.thinking is False


def test_tools_are_chosen_by_name_or_from_a_list() -> None:
    other = {"type": "function", "name": "go"}
    named = turn({"tools": [TOOL, other], "tool_choice": {"type": "function", "name": "go"}})
    assert isinstance(named.prompt, Conversation)
    assert named.prompt.choice == NamedTool("go")
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"name": "go"}]}
    some = turn({"tools": [TOOL, other], "tool_choice": allowed})
    assert isinstance(some.prompt, Conversation)
    assert [tool.name for tool in some.prompt.tools] == ["go"]
    assert some.prompt.choice == "required"


ODD: list[Any] = [None, True, -1, 0, 3, 2**70, 0.5, 1e308, "", "x", "\x00", [], ["x"], [1], {}]
JSON = st.sampled_from([*ODD, *([value] for value in ODD), *({"a": value} for value in ODD)])
TEXTS = st.sampled_from(["", "a", "message", "function", "user", "{}", "\x00", "é"])
PART = st.fixed_dictionaries(
    {}, optional={"type": st.sampled_from(["input_text", "refusal", "x"]), "text": TEXTS | JSON}
)
ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(
            ["message", "function_call", "function_call_output", "reasoning", "item_reference"]
        )
        | JSON,
        "role": st.sampled_from(["user", "assistant", "system", "tool"]) | JSON,
        "content": TEXTS | st.lists(PART, max_size=2) | JSON,
        "summary": st.lists(PART, max_size=2) | JSON,
        "call_id": TEXTS | JSON,
        "name": TEXTS | JSON,
        "arguments": TEXTS | JSON,
        "output": TEXTS | st.lists(PART, max_size=2) | JSON,
        "id": TEXTS | JSON,
    },
)
FIELDS = st.dictionaries(st.sampled_from(CreateResponse.__struct_fields__), JSON, max_size=3)
TOOLS = st.fixed_dictionaries(
    {},
    optional={
        "tools": st.lists(
            st.just(TOOL) | st.fixed_dictionaries({"type": TEXTS, "name": JSON}), max_size=2
        ),
        "tool_choice": st.sampled_from(["auto", "required", "none"]) | JSON,
    },
)
INPUT = TEXTS | st.lists(ITEM, max_size=3) | JSON
BODY = st.builds(lambda given, tools, odd: {"input": given, **tools, **odd}, INPUT, TOOLS, FIELDS)


@settings(max_examples=150, deadline=None)
@given(body=BODY)
def test_any_json_is_a_turn_or_a_refusal_that_says_why(body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    try:
        asked = turn(data)
    except ApiError:
        error = refused(data)
        assert error.status == 400
        assert error.message
    else:
        asked.sampling.validate()
