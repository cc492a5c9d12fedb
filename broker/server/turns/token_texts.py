"""What single tokens are as text and as bytes, for answers with log-probabilities."""

from collections.abc import Iterable, Sequence

from anyio import to_thread

from ...models.chat_format import ChatFormat
from ...request import TokenLogprob


class TokenTexts:
    """The tokens of one answer. `learn` before the others are asked about a token."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._known: dict[int, bytes] = {}

    async def learn(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Look up all tokens in there that are new."""
        await self.look_up(_mentioned(logprobs))

    async def look_up(self, tokens: Iterable[int]) -> None:
        """Look up those that are new."""
        new = list({token for token in tokens if token not in self._known})
        if new:
            found = await to_thread.run_sync(self._chat.token_bytes, new)
            self._known.update(zip(new, found, strict=True))

    def bytes_of(self, token: int) -> bytes:
        """A token's bytes."""
        return self._known[token]

    def text_of(self, token: int) -> str:
        """A token's text; what is a piece of a character has U+FFFD in its place."""
        return self._known[token].decode(errors="replace")

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens in a row."""
        return b"".join(map(self.bytes_of, tokens)).decode(errors="replace")


def _mentioned(logprobs: Sequence[TokenLogprob]) -> Iterable[int]:
    for each in logprobs:
        yield each.token
        for token, _ in each.top:
            yield token
