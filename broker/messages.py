"""What is said in a conversation, and the tools that a model may call in it: plain data, no MLX."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from msgspec import Struct

from .checks import check_kind, check_sized, check_text
from .errors import InvalidRequest

Role = Literal["system", "developer", "user", "assistant", "tool"]
ROLES = get_args(Role)
CHOICES = ("auto", "none", "required")
LONGEST_NAME = 128
MAX_TOOLS = 4096


class ToolCall(Struct, frozen=True):
    """A call that an assistant made. `arguments` is the JSON text of an object."""

    id: str
    name: str
    arguments: str


class Tool(Struct, frozen=True):
    """A function that the model may call. `parameters` is the JSON schema of its arguments, an
    object; without one it takes any.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None


class NamedTool(Struct, frozen=True):
    """The choice of one tool, which has to be called."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


class Message(Struct, frozen=True):
    """One turn of a conversation.

    `tool_calls` are an assistant's; a message of the role `tool` has the result of one of them, and
    says of which by `tool_call_id`, or by `name`. `reasoning` is what an assistant thought before
    its answer; most models read only that of their last turns. With `is_boundary` other prompts are
    likely to agree with this one up to the end of this message.
    """

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""
    is_boundary: bool = False


def check_messages(messages: Sequence[Message]) -> None:
    """Raise `InvalidRequest` unless each is a `Message` that makes sense by itself."""
    check_sized("messages", messages)
    for number, message in enumerate(messages):
        check_kind(f"message {number}", message, Message, "a Message")
        _check_message(number, message)


def check_tools(tools: Sequence[Tool]) -> None:
    """Raise `InvalidRequest` unless each is a `Tool` with a name of its own and a JSON schema."""
    check_sized("tools", tools)
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"{len(tools):,} tools are given; up to {MAX_TOOLS:,} are taken")
    for number, tool in enumerate(tools):
        check_kind(f"tool {number}", tool, Tool, "a Tool")
        _check_name(f"the name of tool {number}", tool.name)
        check_text(f"the description of tool {number}", tool.description)
        if tool.parameters is not None:
            _check_schema(f"the parameters of tool {number}", tool.parameters)
    names = Counter(tool.name for tool in tools)
    twice = next((name for name, count in names.items() if count > 1), None)
    if twice is not None:
        raise InvalidRequest(f"{names[twice]} tools have the name {twice!r}")


def check_tool_choice(choice: ToolChoice, tools: Sequence[Tool]) -> None:
    """Raise `InvalidRequest` for a choice that is none, or that these tools do not allow."""
    if isinstance(choice, NamedTool):
        if choice.name not in [tool.name for tool in tools]:
            raise InvalidRequest(
                f"the tool {choice.name!r} is chosen; it is not among the {len(tools)} tools given"
            )
    elif choice not in CHOICES:
        known = ", ".join(CHOICES)
        raise InvalidRequest(f"the tool choice is {choice!r}; it must be {known} or a NamedTool")
    elif choice == "required" and not tools:
        raise InvalidRequest("a tool call is required; no tools are given")


def _check_message(number: int, message: Message) -> None:
    if message.role not in ROLES:
        known = ", ".join(ROLES)
        raise InvalidRequest(
            f"message {number} has the role {message.role!r}; it must be one of {known}"
        )
    for field in ("content", "tool_call_id", "name", "reasoning"):
        check_text(f"the {field} of message {number}", getattr(message, field))
    check_kind(f"is_boundary of message {number}", message.is_boundary, bool, "True or False")
    check_sized(f"the tool_calls of message {number}", message.tool_calls)
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest(
            f"message {number} has {len(message.tool_calls)} tool calls and the role "
            f"{message.role!r}; only an assistant calls tools"
        )
    for call in message.tool_calls:
        _check_call(f"a tool call of message {number}", call)


def _check_call(where: str, call: ToolCall) -> None:
    check_kind(where, call, ToolCall, "a ToolCall")
    check_text(f"the id of {where}", call.id)
    _check_name(f"the name of {where}", call.name)
    check_text(f"the arguments of {where}", call.arguments)
    try:
        found = json.loads(call.arguments)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the arguments of {where} are not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidRequest(f"the arguments of {where} must be a JSON object")


def _check_name(where: str, name: str) -> None:
    check_text(where, name)
    if not name or len(name) > LONGEST_NAME:
        raise InvalidRequest(
            f"{where} has {len(name):,} characters; it must have 1 to {LONGEST_NAME}"
        )


def _check_schema(where: str, schema: Any) -> None:
    check_kind(where, schema, Mapping, "a JSON schema")
    try:
        json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where} are not JSON: {error}") from error
