"""Replies that a request has begun itself, in a last message of the role assistant."""

from msgspec.structs import replace

from ..generation import Generator
from ..histories import Prompt
from ..turn import Conversation, Turn
from .turns import prefill


class ContinuingGenerator(Generator):
    """Starts turns whose reply goes on from the last messages of the conversation, an assistant's.

    Their text follows the generation prompt, in tokens of its own. The reply has only what is new.
    """

    async def prompt(self, turn: Turn) -> Prompt:
        """The tokens of a turn's prompt, the beginning of the reply included."""
        conversation = turn.prompt
        if not isinstance(conversation, Conversation):
            return await super().prompt(turn)
        begun = prefill(conversation.messages)
        said = conversation.messages[: len(conversation.messages) - len(begun)]
        prompt = await super().prompt(replace(turn, prompt=replace(conversation, messages=said)))
        text = "".join(message.content for message in begun)
        tokens = await self._encode(text, turn.model)
        return prompt._replace(tokens=(*prompt.tokens, *tokens), text=prompt.text + text)

    async def _encode(self, text: str, model: str) -> list[int]:
        """Text as tokens, without those that a tokenizer puts before every text."""
        tokens = await self.broker.encode(text, model=model)
        before = await self.broker.encode("", model=model)
        return tokens[len(before) :] if tokens[: len(before)] == before else tokens
