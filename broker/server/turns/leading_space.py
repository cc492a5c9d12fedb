"""The space before the first word of a continued text, which mlx-lm's detokenizers leave out."""

from collections.abc import Sequence

from anyio import to_thread

from ...models.chat_format import ChatFormat


class LeadingSpace:
    """Puts it back: a text and its continuation give the whole text then."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._first: bytes | None = None
        self._is_past = False

    async def restored(self, text: str, tokens: Sequence[int]) -> str:
        """The next piece of the text, with the tokens behind it."""
        if self._is_past:
            return text
        if self._first is None and tokens:
            [self._first] = await to_thread.run_sync(self._chat.token_bytes, tokens[:1])
        if not text:
            return text
        self._is_past = True
        first = (self._first or b"").decode(errors="ignore")
        lacks = first.startswith(" ") and not text.startswith(first)
        return f" {text}" if lacks else text
