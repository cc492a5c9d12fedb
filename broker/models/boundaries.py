"""Up to where the tokens of a prompt are those of every conversation that begins like it."""

import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..messages import Message, Tool
from .marker import Marker
from .template import ChatTemplate
from .turns import Turns, leading_length

# What may follow instructions: a token that merges with any of these is not shared by all
# conversations.
PROBES = ("A", "b", "0", " ", "\n", "\n\n", ".", "é", "")
KEPT_PREFIXES = 256


class Conversation(NamedTuple):
    """How messages become turns: `native` tools are for the template, `described` ones text."""

    turns: Turns
    native: list[dict[str, Any]] | None = None
    described: Sequence[Tool] = ()
    thinking: bool | None = None


class Boundaries:
    """Measures them, by rendering what else might follow. One thread at a time."""

    def __init__(self, template: ChatTemplate, tokenizer: TokenizerWrapper) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._marker = Marker(tokenizer)
        self._kept: OrderedDict[str, list[int]] = OrderedDict()

    def of(
        self,
        messages: Sequence[Message],
        conversation: Conversation,
        text: str,
        tokens: Sequence[int],
    ) -> tuple[int, ...]:
        """Lengths in tokens, sorted, none twice. `text` and `tokens` are what the messages became.

        The first is the end of the leading instructions and of the tools.
        """
        found = set()
        leading = leading_length(messages)
        if leading or conversation.native or conversation.described:
            shared = self._after_instructions(messages[:leading], conversation)
            found.add(len(common_prefix([tokens, shared])))
        for number, message in enumerate(messages):
            if message.is_boundary and number >= leading:
                found.add(self._after(messages[: number + 1], conversation, text, tokens))
        return tuple(sorted(found - {0}))

    def _after_instructions(
        self, instructions: Sequence[Message], conversation: Conversation
    ) -> list[int]:
        key = _key(instructions, conversation)
        found = self._kept.get(key)
        if found is None:
            texts = self._texts(
                instructions, [Message("user", probe) for probe in PROBES], conversation
            )
            # Of one rendering alone nobody knows what is shared.
            found = self._shared_tokens(_common_text(texts)) if len(texts) > 1 else []
            self._kept[key] = found
        self._kept.move_to_end(key)
        if len(self._kept) > KEPT_PREFIXES:
            self._kept.popitem(last=False)
        return found

    def _after(
        self,
        head: Sequence[Message],
        conversation: Conversation,
        text: str,
        tokens: Sequence[int],
    ) -> int:
        texts = self._texts(head, _continuations(head[-1]), conversation)
        if not texts:
            return 0
        shared = _common_text([text, *texts])
        # Nothing merges with a special token: only what is behind the last one has to be measured.
        cut, before = self._marker.last_mark(text, tokens, shared)
        return before + len(common_prefix([tokens[before:], self._shared_tokens(shared[cut:])]))

    def _texts(
        self, head: Sequence[Message], following: Sequence[Message], conversation: Conversation
    ) -> list[str]:
        """The head with each of the following messages, unless the template refuses that."""
        turns, native, described, thinking = conversation
        texts = [
            self._template.attempt(turns.of([*head, message], described), native, thinking=thinking)
            for message in following
        ]
        return [text for text in texts if text is not None]

    def _shared_tokens(self, text: str) -> list[int]:
        """The tokens that every text begins with that begins with `text`."""
        return common_prefix([self._encoded(text + probe) for probe in PROBES])

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def common_prefix(sequences: Sequence[Sequence[int]]) -> list[int]:
    """The longest list of tokens that all sequences start with."""
    shared: list[int] = []
    for column in zip(*sequences, strict=False):
        if len(set(column)) > 1:
            break
        shared.append(column[0])
    return shared


def _common_text(texts: Sequence[str]) -> str:
    # What the first and the last in order share, all between them share too.
    first, last = min(texts), max(texts)
    length, step = 0, 1 << len(first).bit_length()
    while step:
        if first[length : length + step] == last[length : length + step]:
            length += step
        step //= 2
    return first[:length]


def _continuations(last: Message) -> list[Message]:
    """Messages that may follow one."""
    if last.role == "assistant":
        following = [Message("user", "A"), Message("user", "b")]
        results = [Message("tool", "A", tool_call_id=call.id) for call in last.tool_calls[:1]]
        return [*following, *results]
    return [Message("assistant", "A"), Message("assistant", "b"), Message("user", "A")]


def _key(instructions: Sequence[Message], conversation: Conversation) -> str:
    said = [[message.role, message.content] for message in instructions]
    described = [[tool.name, tool.description, tool.parameters] for tool in conversation.described]
    return json.dumps([said, conversation.native, described, conversation.thinking])
