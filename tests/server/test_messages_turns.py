"""Requests of the Messages API as turns: what is kept, what is refused and where."""

from typing import Any

import pytest

from mlx_swarm.broker.grammar import Grammar
from mlx_swarm.broker.request import Message, NamedTool, Tool, ToolCall
from mlx_swarm.broker.server.bodies import convert
from mlx_swarm.broker.server.errors import ApiError
from mlx_swarm.broker.server.messages.turns import Asked, asked
from mlx_swarm.broker.server.messages.wire import MessagesRequest
from mlx_swarm.broker.server.turns.turn import Caller, Conversation

MARK = {"type": "ephemeral"}
HELLO = {"role": "user", "content": "Hello."}
SCHEMA = {"type": "object"}


def _asked(**fields: Any) -> Asked:
    body = {"model": "m", "max_tokens": 9, "messages": [HELLO], **fields}
    return asked(convert(MessagesRequest, body), Caller(), 0.7)


def _conversation(**fields: Any) -> Conversation:
    prompt = _asked(**fields).turn.prompt
    assert isinstance(prompt, Conversation)
    return prompt


def _said(*content: Any, role: str = "user", **fields: Any) -> tuple[Message, ...]:
    messages = [{"role": role, "content": list(content)}, HELLO]
    return _conversation(messages=messages, **fields).messages[:-1]


def _text(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


def _result(content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "c1", "content": content, **fields}


def test_null_is_what_is_left_out() -> None:
    needed = ("model", "messages", "max_tokens")
    optional = [name for name in MessagesRequest.__struct_fields__ if name not in needed]
    assert _asked(**dict.fromkeys(optional), what_nobody_knows={}) == _asked()


def test_sampling_is_the_requests_or_the_servers() -> None:
    sampling = _asked().turn.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 1.0, 0)
    sampling = _asked(temperature=0, top_p=0.5, top_k=3).turn.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.5, 3)


def test_instructions_are_one_message_and_later_ones_stay_in_their_place() -> None:
    later = {"role": "system", "content": [_text("Be brief.")]}
    system = [_text("x-billing: 7"), _text("You help.")]
    messages = _conversation(system=system, messages=[HELLO, later, HELLO]).messages
    assert [message.role for message in messages] == ["system", "user", "system", "user"]
    assert messages[0].content == "x-billing: 7\n\nYou help."
    assert _conversation(system="").messages == _conversation().messages


def test_results_come_before_the_text_beside_them_each_as_a_message() -> None:
    parts = [_text("21"), _text("degrees")]
    assert _said(_text("And now?"), _result(parts), _result("none", is_error=True)) == (
        Message("tool", "21\n\ndegrees", tool_call_id="c1"),
        Message("tool", "Error: none", tool_call_id="c1"),
        Message("user", "And now?"),
    )
    assert _said(_result(None)) == (Message("tool", "", tool_call_id="c1"),)


def test_an_assistants_blocks_are_one_message() -> None:
    call = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": "é"}}
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    redacted = {"type": "redacted_thinking", "data": "xyz"}
    [message] = _said(redacted, thinking, _text("A"), call, _text("B"), role="assistant")
    assert message == Message(
        "assistant", "AB", tool_calls=(ToolCall("c1", "f", '{"a": "é"}'),), reasoning="Hm."
    )


def test_marks_are_boundaries() -> None:
    assert _asked(system=[_text("Hi.")]).marks == "none"
    assert _asked(system=[_text("Hi.", cache_control=MARK)]).marks == "instructions"
    tool = {"name": "f", "input_schema": SCHEMA, "cache_control": MARK}
    assert _asked(tools=[tool]).marks == "instructions"
    assert _asked(cache_control=MARK).marks == "messages"
    for block in (_text("a", cache_control=MARK), _result("b", cache_control=MARK)):
        assert [message.is_boundary for message in _said(block)] == [True]
        messages = [{"role": "user", "content": [block]}]
        assert _asked(messages=messages).marks == "messages"


def test_tools_and_the_choice_among_them() -> None:
    tools = [{"name": "f", "input_schema": SCHEMA}, {"name": "g", "input_schema": SCHEMA}]

    def chosen(**choice: Any) -> Conversation:
        return _conversation(tools=tools, tool_choice=choice)

    assert chosen(type="auto").tools == (Tool("f", "", SCHEMA), Tool("g", "", SCHEMA))
    assert chosen(type="auto").choice == "auto"
    assert chosen(type="none").choice == "none"
    assert chosen(type="any").choice == "required"
    assert chosen(type="tool", name="g").choice == NamedTool("g")
    assert chosen(type="any", disable_parallel_tool_use=True).parallel_calls is False


def test_a_format_is_a_grammar_whichever_field_it_stands_in() -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    grammar = Grammar(json_schema=SCHEMA)
    assert _asked(output_config={"format": form, "effort": "low"}).turn.grammar == grammar
    assert _asked(output_format=form).turn.grammar == grammar


@pytest.mark.parametrize(
    ("kind", "thinking"), [("enabled", True), ("disabled", False), ("adaptive", None)]
)
def test_thinking_is_on_off_or_the_models_own_way(kind: str, thinking: bool | None) -> None:
    config = {"type": kind, "budget_tokens": 1024}
    assert _conversation(thinking=config).thinking is thinking


def test_a_begun_reply_is_not_thought_about_and_an_empty_one_is_none() -> None:
    begun = {"role": "assistant", "content": "It is"}
    conversation = _conversation(messages=[HELLO, begun])
    assert conversation.messages[-1].role == "user"
    assert conversation.begun == "It is"
    assert conversation.thinking is False
    empty = {"role": "assistant", "content": []}
    assert _conversation(messages=[HELLO, empty]) == _conversation()


def test_no_tokens_asked_for_is_the_prompt_alone() -> None:
    assert _asked(max_tokens=0).turn.generate is False
    assert _asked(max_tokens=1).turn.generate is True


IMAGE = {"type": "image", "source": {"type": "url", "url": "u"}}
CALL = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
FORMAT = {"type": "json_schema", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"messages": [HELLO, {"role": "user", "content": [IMAGE]}]}, "messages[1].content[0]"),
        ({"messages": [{"role": "user", "content": [CALL]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [_result([_text("a"), IMAGE])]}]},
            "messages[0].content[0].content[1]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "search_result"}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "content": [_result("")]}]}, "messages[0].content[0]"),
        ({"messages": [HELLO, {"role": "assistant", "content": [CALL]}]}, "messages[1]"),
        ({"messages": [HELLO, {"role": "assistant", "content": "It is "}]}, "messages[1]"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "messages"),
        (
            {
                "messages": [HELLO, {"role": "assistant", "content": "It"}],
                "thinking": {"type": "enabled"},
            },
            "messages[1]",
        ),
        (
            {"messages": [HELLO, {"role": "assistant", "content": "{"}], "output_format": FORMAT},
            "messages",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"stream": 1}, "stream"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_place(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(ApiError) as refused:
        _asked(**fields)
    assert refused.value.status == 400
    assert refused.value.param == where
    assert where in refused.value.message
