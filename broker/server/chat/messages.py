"""Messages of a body as messages of a conversation."""

from collections.abc import Sequence

from ...messages import Message, Tool, ToolCall
from ..errors import invalid
from .wire import CallBody, FunctionBody, FunctionCall, MessageBody, Part

NO_ARGUMENTS = "{}"


def messages_of(bodies: Sequence[MessageBody]) -> tuple[Message, ...]:
    """A conversation. Raises `ApiError` naming what is not text."""
    if not bodies:
        raise invalid("messages is empty; give at least one", "messages")
    return tuple(_message(each, f"messages[{number}]") for number, each in enumerate(bodies))


def tools_of(functions: Sequence[FunctionBody]) -> tuple[Tool, ...]:
    """The tools that functions are."""
    return tuple(Tool(each.name, each.description or "", each.parameters) for each in functions)


def _message(body: MessageBody, where: str) -> Message:
    role = "tool" if body.role == "function" else body.role
    calls = _calls(body)
    if calls and role != "assistant":
        raise invalid(f"{where} has tool_calls; only an assistant calls tools", where)
    return Message(
        role,
        _text(body.content, f"{where}.content") or body.refusal or "",
        tool_calls=calls,
        tool_call_id=body.tool_call_id or "",
        name=(body.name or "") if role == "tool" else "",
        reasoning=body.reasoning_content or body.reasoning or "",
    )


def _text(content: str | list[Part] | None, where: str) -> str:
    if isinstance(content, list):
        return "".join(_part(part, f"{where}[{at}]") for at, part in enumerate(content))
    return content or ""


def _part(part: Part, where: str) -> str:
    if part.type == "text" and part.text is not None:
        return part.text
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type in ("text", "refusal"):
        raise invalid(f"{where} has no {part.type}", f"{where}.{part.type}")
    raise invalid(f"{where} is of the type {part.type!r}; the model reads text", f"{where}.type")


def _calls(body: MessageBody) -> tuple[ToolCall, ...]:
    bodies = body.tool_calls or []
    if not bodies and body.function_call is not None:
        bodies = [CallBody(body.function_call)]
    return tuple(
        ToolCall(each.id or "", each.function.name, _json(each.function)) for each in bodies
    )


def _json(function: FunctionCall) -> str:
    """A call's arguments. Clients send nothing at all for a call that has none."""
    return (function.arguments or "").strip() or NO_ARGUMENTS
