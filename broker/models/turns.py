"""Messages as the turns that a chat template can show, each at its place."""

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from ..messages import Message, Tool, ToolCall
from .generic_tools import call_text, result_text, tools_text
from .template import CallForm, Traits, Turn, call_turn, function
from .tool_syntax import json_text

SHORT = 9
HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""A half of a surrogate pair, as JSON has it."""


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools in the form of the OpenAI API, as templates and the parsers of mlx-lm take them."""
    empty = {"type": "object", "properties": {}}
    return [function(tool.name, tool.description, tool.parameters or empty) for tool in tools]


class Turns:
    """Makes turns for a template of some `traits`. With `native` it shows tools and calls itself;
    else they are text of ours.
    """

    def __init__(self, traits: Traits, native: bool) -> None:
        self._traits = traits
        self._calls = traits.calls if native else None

    def of(self, messages: Sequence[Message], described: Sequence[Tool] = ()) -> list[Turn]:
        """The turns of a conversation, with the tools that have to be `described` in it."""
        placed = self._placed(list(messages))
        if described:
            placed = self._described(placed, described)
        turns = [self._turn(message) for message in self._paired(placed)]
        if not self._traits.repeated_users:
            turns = _joined(turns)
        return turns if self._traits.user_after_result else _told_with_results(turns)

    def _placed(self, messages: list[Message]) -> list[Message]:
        """With roles that the template knows, where it keeps them at their places."""
        leading = leading_length(messages)
        head, rest = messages[:leading], messages[leading:]
        head = [self._instructions(message) for message in head]
        if len(head) > 1 and not self._traits.late_system:
            content = "\n\n".join(message.content for message in head)
            head = [msgspec.structs.replace(head[0], content=content)]
        return [*head, *(self._later(message) for message in rest)]

    def _instructions(self, message: Message) -> Message:
        if message.role == "developer" and not self._traits.developer:
            return msgspec.structs.replace(message, role="system")
        return message

    def _later(self, message: Message) -> Message:
        if message.role in ("system", "developer"):
            kept = self._traits.late_system
            if kept:
                return self._instructions(message)
            return msgspec.structs.replace(message, role="user")
        return message

    def _described(self, messages: list[Message], tools: Sequence[Tool]) -> list[Message]:
        block = tools_text(tools)
        if messages and messages[0].role in ("system", "developer"):
            first = messages[0]
            content = f"{first.content}\n\n{block}" if first.content else block
            return [msgspec.structs.replace(first, content=content), *messages[1:]]
        return [Message("system" if self._traits.system else "user", block), *messages]

    def _paired(self, messages: list[Message]) -> list[Message]:
        """With one call a turn, its result behind it, where the template takes no more."""
        if self._calls is None or self._traits.several_calls:
            return messages
        paired: list[Message] = []
        rest = list(messages)
        while rest:
            message = rest.pop(0)
            if len(message.tool_calls) < 2:
                paired.append(message)
                continue
            for number, call in enumerate(message.tool_calls):
                own: dict[str, Any] = {} if number == 0 else {"content": "", "reasoning": ""}
                paired.append(msgspec.structs.replace(message, tool_calls=(call,), **own))
                results = [each for each in _results(rest) if each.tool_call_id == call.id]
                paired += results
                rest = [each for each in rest if not any(each is found for found in results)]
        return paired

    def _turn(self, message: Message) -> Turn:
        if message.role == "tool":
            return self._result(message)
        if message.tool_calls:
            return self._with_calls(message)
        turn: Turn = {"role": message.role, "content": message.content}
        return _complete(turn, message)

    def _result(self, message: Message) -> Turn:
        if not self._traits.tool_role:
            return {"role": "user", "content": result_text(message)}
        turn = {"role": "tool", "content": message.content}
        if message.tool_call_id:
            turn["tool_call_id"] = self._identifier(message.tool_call_id)
        if message.name:
            turn["name"] = message.name
        return turn

    def _with_calls(self, message: Message) -> Turn:
        form = self._calls
        if form is None or (message.content and not self._traits.calls_with_text):
            parts = [message.content, *(call_text(call) for call in message.tool_calls)]
            content = "\n".join(part for part in parts if part)
            return _complete({"role": "assistant", "content": content}, message)
        calls = [self._call(call) for call in message.tool_calls]
        return _complete(call_turn(form, message.content, calls), message)

    def _call(self, call: ToolCall) -> tuple[str, str, str, dict[str, Any]]:
        arguments = json.loads(call.arguments)
        if HALF.search(call.arguments):
            arguments = json.loads(json_text(arguments))
        return self._identifier(call.id), call.name, call.arguments, arguments

    def _identifier(self, identifier: str) -> str:
        form: CallForm | None = self._calls
        is_short = len(identifier) == SHORT and identifier.isalnum()
        if form is None or not form.short_ids or is_short:
            return identifier
        return hashlib.sha256(identifier.encode()).hexdigest()[:SHORT]


def leading_length(messages: Sequence[Message]) -> int:
    """How many messages at the start are instructions."""
    for number, message in enumerate(messages):
        if message.role not in ("system", "developer"):
            return number
    return len(messages)


def _results(messages: Sequence[Message]) -> list[Message]:
    """The tool results that a conversation goes on with."""
    found: list[Message] = []
    for message in messages:
        if message.role != "tool":
            break
        found.append(message)
    return found


def _complete(turn: Turn, message: Message) -> Turn:
    if message.reasoning:
        turn["reasoning_content"] = message.reasoning
    if message.name:
        turn["name"] = message.name
    return turn


def _joined(turns: Sequence[Turn]) -> list[Turn]:
    """With one turn for turns of a user that follow each other, and of an assistant too."""
    joined: list[Turn] = []
    for turn in turns:
        last = joined[-1] if joined else None
        if (
            last is None
            or last["role"] != turn["role"]
            or turn["role"] not in ("user", "assistant")
        ):
            joined.append(dict(turn))
            continue
        last["content"] = "\n\n".join(each for each in (last["content"], turn["content"]) if each)
        if "tool_calls" in turn:
            last["tool_calls"] = [*last.get("tool_calls", ()), *turn["tool_calls"]]
    return joined


def _told_with_results(turns: Sequence[Turn]) -> list[Turn]:
    """With what a user says right after a tool's result behind it, in the same turn."""
    told: list[Turn] = []
    for turn in turns:
        if turn["role"] == "user" and told and told[-1]["role"] == "tool":
            told[-1]["content"] = f"{told[-1]['content']}\n\n{turn['content']}"
        else:
            told.append(dict(turn))
    return told
