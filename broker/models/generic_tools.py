"""How tools are told to, and called by, a model whose chat template knows none: all in text."""

import json
from collections.abc import Sequence
from typing import Any

from ..messages import Message, Tool, ToolCall

START, END = "<tool_call>", "</tool_call>"

INTRODUCTION = (
    "You can call the tools below. To call one, write its name and arguments as JSON between "
    f"{START} and {END}, like this:\n"
    f'{START}{{"name": "the tool", "arguments": {{"an argument": "its value"}}}}{END}\n'
    "Write one such block for each call, then stop and wait: the results come in the next message. "
    "Call only these tools, with arguments that fit their JSON schemas:"
)


def tools_text(tools: Sequence[Tool]) -> str:
    """What the instructions say about tools: names, descriptions, JSON schemas, the form of a
    call."""
    return "\n".join([INTRODUCTION, *(_described(tool) for tool in tools)])


def call_text(call: ToolCall) -> str:
    """A call as an assistant writes it."""
    name = json.dumps(call.name, ensure_ascii=False)
    return f'{START}{{"name": {name}, "arguments": {call.arguments}}}{END}'


def result_text(message: Message) -> str:
    """A tool's result as a user tells it."""
    return f"<tool_response>\n{message.content}\n</tool_response>"


def _described(tool: Tool) -> str:
    described: dict[str, Any] = {"name": tool.name}
    if tool.description:
        described["description"] = tool.description
    described["parameters"] = tool.parameters or {"type": "object"}
    return json.dumps(described, ensure_ascii=False)
