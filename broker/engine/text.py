"""Output tokens as text, piece by piece, cut at stop strings. No MLX."""

from collections.abc import Sequence
from typing import Any


class TextStream:
    """Streaming detokenisation of one row.

    Text that may be the beginning of a stop string is held back until that is decided, so nothing
    of a stop string is ever given out, even where it spans many tokens. The text of the first
    `min_tokens` tokens is not searched.
    """

    def __init__(self, detokenizer: Any, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._stops = tuple(stops)
        self._unsearched = min_tokens
        self._longest = max((len(stop) for stop in stops), default=1) - 1
        self._released: list[str] = []
        self._held = ""
        self.stopped = False

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._released)

    def add(self, token: int) -> str:
        """The text that `token` makes certain; sets `stopped` once a stop string is complete."""
        detokenizer = self._detokenizer
        detokenizer.add_token(token)
        segment: str = detokenizer.last_segment
        if self._unsearched:
            self._unsearched -= 1
        elif self._stops:
            return self._advance(segment)
        # Without stop strings nothing is ever undecided.
        if segment:
            self._released.append(segment)
        return segment

    def finish(self) -> str:
        """The rest, once no more tokens come: incomplete characters and what was held back."""
        if self.stopped:
            return ""
        self._detokenizer.finalize()
        if self._unsearched:
            return self._release(self._detokenizer.last_segment)
        piece = self._advance(self._detokenizer.last_segment)
        if self.stopped:
            return piece
        rest, self._held = self._held, ""
        return piece + self._release(rest)

    def _advance(self, segment: str) -> str:
        text = self._held + segment
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return self._release(text[: min(found)])
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return self._release(text[: len(text) - keep])

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        for length in range(min(self._longest, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0

    def _release(self, text: str) -> str:
        if text:
            self._released.append(text)
        return text
