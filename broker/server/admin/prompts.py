"""A prompt in the body of an administrative request: messages, text or tokens."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from ..chat.messages import messages_of, tools_of
from ..chat.wire import MessageBody, ToolBody
from ..errors import invalid
from ..turns.turn import Conversation

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


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
        tools = tools_of([each.function for each in self.tools or ()])
        return Conversation(messages=messages_of(messages), tools=tools)
