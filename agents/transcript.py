"""The tokens of one conversation. They only ever grow, so the next turn's prompt hits the cache."""

from collections.abc import Sequence
from typing import NamedTuple

from mlx_swarm.broker.errors import InvalidRequest
from mlx_swarm.broker.request import Message

from .interface import SwarmBroker

STAND_IN_REPLIES = ("A", "B")
LONGEST_CLOSING = 32


class Prompt(NamedTuple):
    """What a turn asks the model to continue, and where its shared beginnings end."""

    tokens: tuple[int, ...]
    boundaries: tuple[int, ...]


class Transcript:
    """Everything said between a user and one agent, as tokens and as messages.

    Tokens that the model generated are kept as they are, never tokenized again: the tokens of a
    turn are a prefix of the next turn's prompt. `model` is whose chat template is used.
    """

    def __init__(self, instructions: str = "", model: str = "") -> None:
        self._model = model
        self._messages = [Message("system", instructions)] if instructions else []
        self._tokens: tuple[int, ...] = ()
        self._boundaries: tuple[int, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens up to the end of the last reply."""
        return self._tokens

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages up to the last reply."""
        return tuple(self._messages)

    async def prompt(self, broker: SwarmBroker, text: str) -> Prompt:
        """The prompt of the next turn, in which the user says `text`. Changes nothing."""
        if not self._tokens:
            messages = [*self._messages, Message("user", text)]
            rendered = await broker.render(messages, model=self._model)
            return Prompt(tuple(rendered.tokens), tuple(rendered.boundaries))
        addition = await _after_a_reply(broker, text, self._model)
        overlap = _overlap(self._tokens, addition)
        return Prompt(self._tokens + addition[overlap:], self._boundaries)

    def append(self, prompt: Prompt, text: str, reply: str, generated: Sequence[int]) -> None:
        """Keep a turn that is complete: what the user said, the reply, and the tokens of both."""
        self._tokens = prompt.tokens + tuple(generated)
        self._boundaries = prompt.boundaries
        self._messages += [Message("user", text), Message("assistant", reply)]


async def _after_a_reply(broker: SwarmBroker, text: str, model: str) -> tuple[int, ...]:
    """The tokens between the end of any reply and the next one.

    Two renderings that differ in nothing but the reply end in the same tokens, and these are what
    the chat template puts there: the end of the reply, the user's turn, the next reply's opening.
    """
    first, second = [
        (await broker.render(_conversation(reply, text), model=model)).tokens
        for reply in STAND_IN_REPLIES
    ]
    if list(first) == list(second):
        raise InvalidRequest("the chat template leaves replies out: an agent on it has one turn")
    length = 0
    for left, right in zip(reversed(first), reversed(second), strict=False):
        if left != right:
            break
        length += 1
    return tuple(first[len(first) - length :])


def _conversation(reply: str, text: str) -> list[Message]:
    return [Message("user", "?"), Message("assistant", reply), Message("user", text)]


def _overlap(tokens: tuple[int, ...], addition: tuple[int, ...]) -> int:
    """How many tokens of `addition` end `tokens` already, such as the mark that ends a turn."""
    longest = min(len(tokens), len(addition), LONGEST_CLOSING)
    return next(n for n in range(longest, -1, -1) if tokens[len(tokens) - n :] == addition[:n])
