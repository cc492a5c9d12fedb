"""From items to messages: what a chat template is given for a conversation."""

from collections.abc import Iterable

from msgspec.structs import replace

from ...messages import Message, ToolCall
from .items import CallItem, MessageItem, ParsedItem, ReasoningItem, ResultItem, parse, text_of
from .objects import Item, OutputCall, OutputItem, OutputMessage, OutputReasoning
from .store import Stored


def conversation(
    instructions: str | None, before: Iterable[Stored], items: Iterable[Item]
) -> tuple[Message, ...]:
    """The messages of a conversation: instructions, the responses before, and new input.

    The instructions of the responses before are no part of it.
    """
    messages = [Message("system", instructions)] if instructions else []
    for stored in before:
        messages += input_messages(stored.input)
        messages += reply(stored.response.output)
    return (*messages, *input_messages(items))


def input_messages(items: Iterable[Item]) -> list[Message]:
    """Items as messages.

    What the model thought, said and called in one go is one message: reasoning belongs to what
    follows it, a call to what comes before it.
    """
    messages: list[Message] = []
    for item in items:
        _add(messages, parse(item))
    return messages


def reply(output: Iterable[OutputItem]) -> list[Message]:
    """The output of a response as the one message that it was; none if it is empty."""
    text, reasoning, calls = [], [], []
    for item in output:
        match item:
            case OutputMessage():
                text += [part.text for part in item.content]
            case OutputReasoning():
                reasoning += [part.text for part in item.content]
            case OutputCall():
                calls.append(ToolCall(item.call_id, item.name, item.arguments or "{}"))
    if not (text or reasoning or calls):
        return []
    return [
        Message("assistant", "".join(text), tool_calls=tuple(calls), reasoning="".join(reasoning))
    ]


def _add(messages: list[Message], item: ParsedItem) -> None:
    match item:
        case ReasoningItem():
            thought = text_of(item.content) or text_of(item.summary)
            messages.append(Message("assistant", reasoning=thought))
        case CallItem():
            call = ToolCall(item.call_id, item.name, item.arguments or "{}")
            last = _last_reply(messages)
            messages.append(replace(last, tool_calls=(*last.tool_calls, call)))
        case ResultItem():
            messages.append(
                Message(
                    "tool",
                    text_of(item.output),
                    tool_call_id=item.call_id or "",
                    name=item.name or "",
                )
            )
        case MessageItem(role="assistant"):
            last = _last_reply(messages, open_only=True)
            messages.append(replace(last, content=last.content + text_of(item.content)))
        case MessageItem():
            messages.append(Message(item.role, text_of(item.content)))


def _last_reply(messages: list[Message], *, open_only: bool = False) -> Message:
    """The reply that a further part belongs to, taken off the end; a new one if there is none.

    With `open_only` one that has said something and called nothing is over.
    """
    if messages and messages[-1].role == "assistant":
        last = messages[-1]
        if not open_only or last.tool_calls or not last.content:
            return messages.pop()
    return Message("assistant")
