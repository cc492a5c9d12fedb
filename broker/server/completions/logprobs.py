"""Log-probabilities of a completion's tokens, in the lists that OpenAI makes of them."""

import codecs
from collections.abc import Iterable, Sequence

from ...request import TokenLogprob
from ..turns.token_texts import TokenTexts
from .wire import Logprobs

Known = tuple[int, TokenLogprob | None]


class LogprobsWriter:
    """Writes the tokens of one choice, part by part, and knows how far its text has come."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    async def prompt(
        self, text: str, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None]
    ) -> Logprobs:
        """Those of the prompt, whose first tokens need not be part of its text."""
        await self._texts.look_up(tokens)
        await self._texts.learn([each for each in logprobs if each is not None])
        unseen = bool(tokens) and not text.startswith(self._texts.text_of(tokens[0]))
        return self._written(zip(tokens, logprobs, strict=True), unseen=unseen)

    async def reply(self, logprobs: Sequence[TokenLogprob]) -> Logprobs:
        """More of what was generated."""
        await self._texts.learn(logprobs)
        return self._written((each.token, each) for each in logprobs)

    def _written(self, tokens: Iterable[Known], *, unseen: bool = False) -> Logprobs:
        written = Logprobs([], [], [], [])
        for token, logprob in tokens:
            written.tokens.append(self._texts.text_of(token))
            written.token_logprobs.append(logprob.logprob if logprob else None)
            written.top_logprobs.append(self._top(logprob) if logprob else None)
            written.text_offset.append(self._offset)
            if not unseen:
                self._offset += len(self._characters.decode(self._texts.bytes_of(token)))
            unseen = False
        return written

    def _top(self, logprob: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and the token itself. Of those that look alike the likeliest."""
        top: dict[str, float] = {}
        for token, each in (*logprob.top, (logprob.token, logprob.logprob)):
            top.setdefault(self._texts.text_of(token), each)
        return top


def joined(first: Logprobs, second: Logprobs) -> Logprobs:
    """One after the other."""
    return Logprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )
