"""What was said before, as the tokens that the model wrote: histories that clients send again.

A client sends a conversation as messages. Rendered and tokenized anew, a reply need not give the
tokens that were generated; then the next turn would miss from there on. So what every turn became
is kept, and a conversation that continues it gets its very tokens.
"""

from typing import NamedTuple

from ..models.chat_format import ChatFormat
from .turn import Caller, Conversation, Ended


class Prompt(NamedTuple):
    """A prompt as tokens, and as the `text` that the template made of it; `boundaries` in tokens.

    `caller` is who it belongs to, an agent found by lineage included.
    """

    tokens: tuple[int, ...]
    boundaries: tuple[int, ...]
    text: str
    caller: Caller


class Histories:
    """Conversations and the tokens they became. May be used from any thread."""

    def prompt(
        self, chat: ChatFormat, model: str, conversation: Conversation, caller: Caller
    ) -> Prompt:
        """The prompt of a conversation. Raises `InvalidRequest` if it cannot be rendered."""
        rendered = chat.render(
            conversation.messages, conversation.tools, thinking=conversation.thinking
        )
        return Prompt(tuple(rendered.tokens), rendered.boundaries, rendered.text, caller)

    def keep(self, prompt: Prompt, model: str, conversation: Conversation, ended: Ended) -> None:
        """Remember what a turn became."""
