"""A prompt in the body of an administrative request: messages, text or tokens."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ..request import Message, Tool, ToolCall
from .errors import invalid
from .turn import Conversation

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class TextPart(Struct, tag_field="type", tag="text"):
    text: str


class FunctionCall(Struct):
    name: str
    arguments: str = "{}"


class CallBody(Struct):
    function: FunctionCall
    id: str = ""


class MessageBody(Struct):
    """A message as chat completions have it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[CallBody] | None = None
    tool_call_id: str = ""
    name: str = ""

    def message(self) -> Message:
        """What the chat template gets."""
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        calls = tuple(
            ToolCall(each.id, each.function.name, each.function.arguments)
            for each in self.tool_calls or ()
        )
        return Message(
            self.role, text, tool_calls=calls, tool_call_id=self.tool_call_id, name=self.name
        )


class FunctionBody(Struct):
    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None


class ToolBody(Struct):
    function: FunctionBody


class PromptBody(Struct, kw_only=True):
    """Exactly one of `messages`, `prompt` (text or tokens), `text` and `tokens`."""

    model: str = ""
    messages: list[MessageBody] | None = None
    tools: list[ToolBody] | None = None
    prompt: str | list[TokenId] | None = None
    text: str | None = None
    tokens: list[TokenId] | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None

    def given(self) -> Conversation | str | tuple[int, ...]:
        """The prompt of a turn. Raises `ApiError` unless there is exactly one, and not empty."""
        fields = {
            "messages": self.messages,
            "prompt": self.prompt,
            "text": self.text,
            "tokens": self.tokens,
        }
        names = [name for name, value in fields.items() if value is not None]
        if len(names) != 1:
            found = " and ".join(names) or "none"
            raise invalid(f"give one of {', '.join(fields)}; got {found}", "prompt")
        value = fields[names[0]]
        if not value:
            raise invalid(f"{names[0]} is empty", names[0])
        if self.messages is not None:
            return self._conversation(self.messages)
        return value if isinstance(value, str) else tuple(value)  # type: ignore[arg-type]

    def _conversation(self, messages: list[MessageBody]) -> Conversation:
        tools = tuple(
            Tool(each.function.name, each.function.description, each.function.parameters)
            for each in self.tools or ()
        )
        return Conversation(messages=tuple(each.message() for each in messages), tools=tools)
