"""The marks of a model's output as its tokenizer and a grammar know them."""

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from .tool_syntax import ThinkTags


class Marker:
    """Looks at the added tokens of a tokenizer."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer

    def token(self, mark: str) -> int | None:
        """The id of the token that a mark is, if a grammar sees one token in it."""
        return self._special.get(mark)

    def pieces(self, mark: str) -> list[str]:
        """A mark as terminals of a grammar: `<[id]>` for special tokens and quoted text."""
        cut = re.split(f"({self._pattern})", mark) if self._pattern else [mark]
        return [
            f"<[{self._special[piece]}]>" if piece in self._special else quoted(piece)
            for piece in cut
            if piece
        ]

    def is_open(self, think: ThinkTags, prompt_text: str) -> bool:
        """Whether a prompt ends within reasoning: with its mark, or in the same turn behind it."""
        _, mark, tail = prompt_text.rpartition(think.start)
        if not mark or think.end in tail:
            return False
        return not (self._pattern and re.search(self._pattern, tail))

    def last_mark(self, text: str, tokens: Sequence[int], beginning: str) -> tuple[int, int]:
        """Where in the `beginning` of a text its last special token is: its first character, and
        its number among the text's `tokens`. (0, 0) without one."""
        if not self._pattern:
            return 0, 0
        before = [found.start() for found in re.finditer(self._pattern, beginning)]
        known = set(self._special.values())
        places = [at for at, token in enumerate(tokens) if token in known]
        # A tokenizer may take less for special, or more: then nothing is known of its tokens.
        if not before or len(places) != len(re.findall(self._pattern, text)):
            return 0, 0
        return before[-1], places[len(before) - 1]

    @cached_property
    def _special(self) -> dict[str, int]:
        """The added tokens that llguidance takes for no text."""
        added: dict[int, Any] = getattr(self._tokenizer, "added_tokens_decoder", {})
        return {
            str(token): number
            for number, token in added.items()
            if token.special or (str(token).startswith("<") and str(token).endswith(">"))
        }

    @cached_property
    def _pattern(self) -> str:
        longest_first = sorted(self._special, key=len, reverse=True)
        return "|".join(map(re.escape, longest_first))


def quoted(text: str) -> str:
    """Text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)
