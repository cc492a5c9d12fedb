"""What a request of the Messages API asks for, as a turn.

Images, documents and the tools of Anthropic's own servers are refused: left out, they would be
missed where nobody looks. So are blocks that only such a tool leads to.
"""

import json
from collections.abc import Sequence
from itertools import takewhile
from typing import Literal, NamedTuple

from msgspec.structs import replace

from ...grammar import Grammar
from ...request import Message, NamedTool, Sampling, Tool, ToolCall, ToolChoice
from ..errors import invalid
from ..turns.turn import Caller, Conversation, Turn
from .wire import (
    Block,
    ChosenTool,
    CountRequest,
    Document,
    Image,
    InputMessage,
    MessagesRequest,
    RedactedThinking,
    Text,
    Thinking,
    ToolDefinition,
    ToolResult,
    ToolUse,
)

JOINT = "\n\n"
"""Between text blocks of a user and of the instructions; an assistant's follow each other."""

Marks = Literal["none", "instructions", "messages"]


class Asked(NamedTuple):
    """A turn, and up to where its prompt is marked as one that others share."""

    turn: Turn
    marks: Marks


def asked(body: MessagesRequest, caller: Caller, temperature: float) -> Asked:
    """The turn of a request, with that temperature if it says none. Raises `ApiError`."""
    if body.max_tokens < 0:
        raise invalid(f"max_tokens: {body.max_tokens} is less than 0", "max_tokens")
    prompt = conversation(body)
    turn = Turn(
        prompt=prompt,
        caller=caller,
        model=body.model,
        max_tokens=body.max_tokens,
        sampling=Sampling(
            temperature=temperature if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=body.top_k or 0,
        ),
        grammar=_grammar(body),
        stop=tuple(body.stop_sequences or ()),
        generate=body.max_tokens > 0,
    )
    if turn.grammar is not None and prompt.begun:
        raise invalid(
            "messages: a reply of a given format cannot be begun by a last message of the role "
            "assistant",
            "messages",
        )
    return Asked(turn, _marks(body, prompt))


def conversation(body: CountRequest) -> Conversation:
    """The messages and tools of a request. Raises `ApiError`."""
    messages = tuple(_messages(body))
    thinking = _thinking(body)
    text = ""
    if begun := _prefill(messages):
        where = f"messages[{len(body.messages) - 1}]"
        text = _checked(where, begun, thinking)
        thinking = False if text else thinking
        messages = messages[: -len(begun)]
    if not body.messages or not messages:
        raise invalid("messages: at least one message is needed", "messages")
    tools = tuple(_tool(number, each) for number, each in enumerate(body.tools or ()))
    chosen = body.tool_choice or ChosenTool("auto")
    return Conversation(
        messages=messages,
        tools=tools,
        choice=_choice(chosen, tools),
        parallel_calls=not chosen.disable_parallel_tool_use,
        thinking=thinking,
        begun=text,
    )


def _prefill(messages: Sequence[Message]) -> Sequence[Message]:
    """Those that the reply is to continue: an assistant's at the end."""
    length = len(messages)
    while length and messages[length - 1].role == "assistant":
        length -= 1
    return messages[length:]


def _messages(body: CountRequest) -> list[Message]:
    messages: list[Message] = []
    if body.system:
        texts = [Text(body.system)] if isinstance(body.system, str) else body.system
        content = JOINT.join(each.text for each in texts)
        is_marked = any(each.cache_control for each in texts)
        messages.append(Message("system", content, is_boundary=is_marked))
    for number, each in enumerate(body.messages):
        messages += _turns(f"messages[{number}]", each)
    if body.cache_control is not None and messages:
        messages[-1] = replace(messages[-1], is_boundary=True)
    return messages


def _turns(where: str, message: InputMessage) -> list[Message]:
    content = message.content
    blocks: list[Block] = [Text(content)] if isinstance(content, str) else content
    if message.role == "assistant":
        return [_assistant(where, blocks)]
    allowed = (Text, ToolResult) if message.role == "user" else (Text,)
    _check_blocks(where, message.role, blocks, allowed)
    results = [
        _result(f"{where}.content[{number}]", each)
        for number, each in enumerate(blocks)
        if isinstance(each, ToolResult)
    ]
    texts = [each for each in blocks if isinstance(each, Text)]
    if results and not texts:
        return results
    is_marked = any(each.cache_control for each in texts)
    text = JOINT.join(each.text for each in texts)
    return [*results, Message(message.role, text, is_boundary=is_marked)]


def _assistant(where: str, blocks: Sequence[Block]) -> Message:
    _check_blocks(where, "assistant", blocks, (Text, Thinking, RedactedThinking, ToolUse))
    return Message(
        "assistant",
        "".join(each.text for each in blocks if isinstance(each, Text)),
        tool_calls=tuple(_call(each) for each in blocks if isinstance(each, ToolUse)),
        reasoning="".join(each.thinking for each in blocks if isinstance(each, Thinking)),
        is_boundary=any(each.cache_control for each in blocks if isinstance(each, Text | ToolUse)),
    )


def _call(block: ToolUse) -> ToolCall:
    return ToolCall(block.id, block.name, json.dumps(block.input, ensure_ascii=False))


def _result(where: str, block: ToolResult) -> Message:
    content = block.content or ""
    if not isinstance(content, str):
        _check_blocks(where, "tool_result", content, (Text,))
        content = JOINT.join(each.text for each in content if isinstance(each, Text))
    # No template has a place for the flag.
    content = f"Error: {content}" if block.is_error else content
    return Message(
        "tool",
        content,
        tool_call_id=block.tool_use_id,
        is_boundary=block.cache_control is not None,
    )


def _check_blocks(
    where: str, whose: str, blocks: Sequence[Block], allowed: tuple[type[Block], ...]
) -> None:
    for number, block in enumerate(blocks):
        if isinstance(block, allowed):
            continue
        field = f"{where}.content[{number}]"
        kind = block.__struct_config__.tag
        if isinstance(block, Image | Document):
            raise invalid(f"{field}: a block of the type {kind} cannot be read; give text", field)
        raise invalid(f"{field}: a block of the type {kind} cannot stand in {whose}", field)


def _checked(where: str, begun: Sequence[Message], thinking: bool | None) -> str:
    """The text that the reply continues. Raises `ApiError` if it cannot."""
    text = "".join(message.content for message in begun)
    if any(message.tool_calls for message in begun):
        raise invalid(f"{where}: a tool_use needs its tool_result in a message after it", where)
    if text != text.rstrip():
        raise invalid(
            f"{where}: a last message of the role assistant must not end with white space", where
        )
    if text and thinking:
        raise invalid(
            f"{where}: with thinking enabled the reply cannot be begun by a last message of the "
            "role assistant",
            where,
        )
    return text


def _marks(body: CountRequest, conversation: Conversation) -> Marks:
    leading = list(takewhile(lambda message: message.role == "system", conversation.messages))
    if any(message.is_boundary for message in conversation.messages[len(leading) :]):
        return "messages"
    is_marked = any(each.is_boundary for each in leading)
    is_marked = is_marked or any(tool.cache_control for tool in body.tools or ())
    return "instructions" if is_marked else "none"


def _thinking(body: CountRequest) -> bool | None:
    """With `adaptive` and without a word it is the model's own way."""
    known = {"enabled": True, "disabled": False}
    return None if body.thinking is None else known.get(body.thinking.type)


def _tool(number: int, tool: ToolDefinition) -> Tool:
    where = f"tools[{number}]"
    if tool.type not in (None, "custom"):
        raise invalid(
            f"{where}.type: {tool.type!r} is a tool of Anthropic's servers; only tools of the type "
            "custom can be given",
            f"{where}.type",
        )
    if tool.input_schema is None:
        raise invalid(f"{where}.input_schema: a tool needs one", f"{where}.input_schema")
    return Tool(tool.name, tool.description or "", tool.input_schema)


def _choice(chosen: ChosenTool, tools: Sequence[Tool]) -> ToolChoice:
    match chosen.type:
        case "auto" | "none":
            return chosen.type
        case "any" if tools:
            return "required"
        case "tool" if chosen.name in [tool.name for tool in tools]:
            return NamedTool(chosen.name or "")
    raise invalid(
        f"tool_choice: {chosen.name or 'any tool'!r} is not among the {len(tools)} tools given",
        "tool_choice",
    )


def _grammar(body: CountRequest) -> Grammar | None:
    config = body.output_config
    form = config.format if config is not None and config.format is not None else body.output_format
    return None if form is None else Grammar(json_schema=form.schema)
