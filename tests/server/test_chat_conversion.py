"""From bodies to turns: what is refused names its field, and nothing is ever a server's error."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_swarm.broker.messages import Message, NamedTool, Tool, ToolCall
from mlx_swarm.broker.server.bodies import decode
from mlx_swarm.broker.server.chat.turns import turns_of
from mlx_swarm.broker.server.chat.wire import ChatBody
from mlx_swarm.broker.server.completions.turns import turns_of as completion_turns
from mlx_swarm.broker.server.completions.wire import CompletionBody
from mlx_swarm.broker.server.errors import ApiError
from mlx_swarm.broker.server.settings import ServerSettings
from mlx_swarm.broker.server.turns.turn import Caller, Conversation, Turn

SETTINGS = ServerSettings(temperature=0.7)
HELLO = [{"role": "user", "content": "Hello"}]
FIND = {
    "type": "function",
    "function": {"name": "find", "parameters": {"type": "object", "properties": {}}},
}
SEND = {"type": "function", "function": {"name": "send", "description": "Send it", "strict": True}}
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "auto", "none", "required", "text", "json_object", "find", "0", "é"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "function", "name", "3"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def _turns(**fields: Any) -> list[Turn]:
    body = decode(ChatBody, msgspec.json.encode({"messages": HELLO, **fields}))
    return turns_of(body, Caller(), SETTINGS)


def _completions(**fields: Any) -> list[Turn]:
    body = decode(CompletionBody, msgspec.json.encode(fields))
    return completion_turns(body, Caller(), SETTINGS)


def _refusal(make: Callable[[], list[Turn]]) -> ApiError | None:
    try:
        assert make()
    except ApiError as error:
        return error
    return None


def _conversation(**fields: Any) -> Conversation:
    prompt = _turns(**fields)[0].prompt
    assert isinstance(prompt, Conversation)
    return prompt


@given(st.dictionaries(st.sampled_from(ChatBody.__struct_fields__), VALUES, max_size=4))
def test_any_json_in_any_field_of_a_chat_is_a_turn_or_refused(fields: dict[str, Any]) -> None:
    error = _refusal(lambda: _turns(**fields))
    assert error is None or (error.status == 400 and error.param)


@given(st.dictionaries(st.sampled_from(CompletionBody.__struct_fields__), VALUES, max_size=4))
def test_any_json_in_any_field_of_a_completion_is_a_turn_or_refused(fields: dict[str, Any]) -> None:
    error = _refusal(lambda: _completions(**fields))
    assert error is None or (error.status == 400 and error.param)


@pytest.mark.parametrize(
    "name", [each for each in ChatBody.__struct_fields__ if each != "messages"]
)
def test_null_is_the_same_as_nothing(name: str) -> None:
    assert _turns(**{name: None}) == _turns()


def test_every_role_comes_through() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "find", "arguments": ""}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, _text("brief.")]},
        {"role": "user", "content": "Find it", "name": "kim"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Look."},
        {"role": "tool", "tool_call_id": "a", "content": "found"},
        {"role": "assistant", "function_call": {"name": "find", "arguments": '{"x": 1}'}},
        {"role": "function", "name": "find", "content": "found again"},
        {"role": "assistant", "refusal": "No.", "reasoning_content": "Hm."},
    ]
    assert _conversation(messages=messages).messages == (
        Message("developer", "Be brief."),
        Message("user", "Find it"),
        Message("assistant", "", (ToolCall("a", "find", "{}"),), reasoning="Look."),
        Message("tool", "found", tool_call_id="a"),
        Message("assistant", "", (ToolCall("", "find", '{"x": 1}'),)),
        Message("tool", "found again", name="find"),
        Message("assistant", "No.", reasoning="Hm."),
    )


def test_tools_and_their_choice() -> None:
    assert _conversation(tools=[SEND]).tools == (Tool("send", "Send it"),)
    both: dict[str, Any] = {"tools": [FIND, SEND]}
    named = {"type": "function", "function": {"name": "send"}}
    assert _conversation(**both).choice == "auto"
    assert _conversation(**both, tool_choice="required").choice == "required"
    assert _conversation(**both, tool_choice=named).choice == NamedTool("send")
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    conversation = _conversation(**both, tool_choice=allowed)
    assert [tool.name for tool in conversation.tools] == ["send"]
    assert conversation.choice == "required"
    assert _conversation(**both, parallel_tool_calls=False).parallel_calls is False


def test_functions_are_tools_called_one_at_a_time() -> None:
    conversation = _conversation(functions=[{"name": "find"}], function_call={"name": "find"})
    assert conversation.tools == (Tool("find"),)
    assert conversation.choice == NamedTool("find")
    assert not conversation.parallel_calls


def test_a_format_holds_for_text_and_not_where_a_tool_has_to_be_called() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for fields in ({}, {"tools": [FIND]}):
        grammar = _turns(response_format=wanted, **fields)[0].grammar
        assert grammar is not None
        assert grammar.json_schema == schema
    required = _turns(response_format=wanted, tools=[FIND], tool_choice="required")
    assert required[0].grammar is None
    assert _turns(response_format={"type": "text"})[0].grammar is None


def test_choices_have_seeds_of_their_own() -> None:
    assert _turns()[0].sampling.seed is None
    seeds = [turn.sampling.seed for turn in _turns(seed=7, n=3)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3
    completions = _completions(prompt=["a", "b"], seed=7, n=3)
    assert [turn.sampling.seed for turn in completions] == seeds * 2
    assert [turn.prompt for turn in completions] == ["a"] * 3 + ["b"] * 3


def test_sampling_stops_and_thinking() -> None:
    [turn] = _turns(temperature=None, top_k=4, logit_bias={"12": -100}, stop="x", min_tokens=2)
    assert turn.sampling.temperature == 0.7
    assert (turn.sampling.top_k, turn.sampling.min_tokens) == (4, 2)
    assert turn.sampling.logit_bias == {12: -100.0}
    assert turn.stop == ("x",)
    assert _turns(max_tokens=5, max_completion_tokens=4)[0].max_tokens == 4
    assert _conversation().thinking is None
    assert _conversation(reasoning_effort="none").thinking is False
    assert _conversation(reasoning_effort="high").thinking is True
    assert _conversation(chat_template_kwargs={"enable_thinking": False}).thinking is False


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "boss", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"presence_penalty": 1000}, "presence_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"3": 1000}}, "logit_bias"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": [FIND, FIND]}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [FIND], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"modalities": ["text", "audio"]}, "modalities"),
    ],
)
def test_what_is_wrong_in_a_chat_names_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        _turns(**fields)
    assert refused.value.status == 400
    assert refused.value.param == param


def test_a_field_that_is_not_there_is_named() -> None:
    with pytest.raises(ApiError) as refused:
        decode(ChatBody, b"{}")
    assert (refused.value.status, refused.value.param) == (400, "messages")


def test_half_a_character_is_no_text() -> None:
    with pytest.raises(ApiError) as refused:
        decode(ChatBody, rb'{"messages": [{"role": "user", "content": "\ud800"}]}')
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[0]"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": ["a"] * 9, "n": 128}, "prompt"),
    ],
)
def test_what_is_wrong_in_a_completion_names_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        _completions(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_prompts_come_in_four_forms() -> None:
    assert [turn.prompt for turn in _completions(prompt="a")] == ["a"]
    assert [turn.prompt for turn in _completions(prompt=[1, 2])] == [(1, 2)]
    assert [turn.prompt for turn in _completions(prompt=[[1, 2], [3]])] == [(1, 2), (3,)]
    [turn] = _completions(prompt="a", echo=True, logprobs=1, max_tokens=0)
    assert turn.prompt_logprobs
    assert not turn.generate


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
