"""What may be said in a conversation, seen without a model."""

from typing import Any

import pytest

from mlx_swarm.broker import InvalidRequest, Message, NamedTool, Request, Tool, ToolCall
from mlx_swarm.broker.messages import check_tool_choice, check_tools

CALL = ToolCall("call_1", "look", '{"at": 1}')


def test_a_conversation_with_tools_is_taken() -> None:
    messages = [
        Message("system", "Be brief.", is_boundary=True),
        Message("developer", "In English."),
        Message("user", "Look."),
        Message("assistant", "", (CALL,), reasoning="Hm."),
        Message("tool", "seen", tool_call_id="call_1", name="look"),
        Message("assistant"),
    ]
    Request(messages=messages).validate()


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Message("bot", "x"), "message 0 has the role 'bot'; it must be one of system, developer"),  # type: ignore[arg-type]
        (Message("user", None), "the content of message 0 is None; it must be text"),  # type: ignore[arg-type]
        (Message("user", "x", name=3), "the name of message 0 is 3"),  # type: ignore[arg-type]
        (Message("tool", "x", tool_call_id=3), "the tool_call_id of message 0 is 3"),  # type: ignore[arg-type]
        (Message("assistant", reasoning="\ud800"), "the reasoning of message 0 has half a char"),
        (Message("user", "x", is_boundary=1), "is_boundary of message 0 is 1"),  # type: ignore[arg-type]
        (Message("user", "x", (CALL,)), "has 1 tool calls and the role 'user'; only an assistant"),
        (Message("assistant", tool_calls=5), "the tool_calls of message 0 is 5"),  # type: ignore[arg-type]
        (Message("assistant", tool_calls=({},)), "a tool call of message 0 is {}"),  # type: ignore[arg-type]
        (Message("assistant", tool_calls=(ToolCall("", "", "{}"),)), "has 0 characters; it must"),
        (Message("assistant", tool_calls=(ToolCall("", "f", "{"),)), "arguments of .* not JSON"),
        (Message("assistant", tool_calls=(ToolCall("", "f", "1"),)), "must be a JSON object"),
    ],
)
def test_a_message_that_makes_no_sense_is_refused(message: Message, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        Request(messages=[message]).validate()


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ([None], "tool 0 is None; it must be a Tool"),
        (5, "tools is 5; it must be a list"),
        ([Tool("a" * 129)], "the name of tool 0 has 129 characters; it must have 1 to 128"),
        ([Tool("f", 3)], "the description of tool 0 is 3"),  # type: ignore[arg-type]
        ([Tool("f"), Tool("g"), Tool("f")], "2 tools have the name 'f'"),
        ([Tool("f")] * 5000, "5,000 tools are given; up to 4,096 are taken"),
        ([Tool("f", "", [])], "the parameters of tool 0 is"),  # type: ignore[arg-type]
        ([Tool("f", "", {"a": {1}})], "the parameters of tool 0 are not JSON"),
    ],
)
def test_tools_that_make_no_sense_are_refused(tools: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        check_tools(tools)


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("must", "the tool choice is 'must'; it must be auto, none, required or a NamedTool"),
        (NamedTool("g"), "the tool 'g' is chosen; it is not among the 1 tools given"),
    ],
)
def test_a_choice_that_tools_do_not_allow_is_refused(choice: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        check_tool_choice(choice, [Tool("f")])


def test_no_call_can_be_required_without_tools() -> None:
    with pytest.raises(InvalidRequest, match="a tool call is required; no tools are given"):
        check_tool_choice("required", [])
