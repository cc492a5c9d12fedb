"""How many prompt tokens to compute at once, by how fast the last ones were. No MLX."""

from collections import deque

LONGEST = 8192
"""Tokens computed at once at most, whatever the speed."""

REMEMBERED = 8
"""The best of so many chunks is the speed: others may have had kernels to load first."""


class Pace:
    """Gives a number of tokens that takes about `seconds`: a multiple of `chunk`, at least one."""

    def __init__(self, chunk: int, seconds: float) -> None:
        self._chunk = chunk
        self._seconds = seconds
        self._rates: deque[float] = deque(maxlen=REMEMBERED)

    def note(self, tokens: int, seconds: float) -> None:
        """So many tokens were computed in so many seconds."""
        if seconds > 0:
            self._rates.append(tokens / seconds)

    def tokens(self) -> int:
        """Tokens to compute at once."""
        affordable = min(max(self._rates, default=0.0) * self._seconds, LONGEST)
        return max(1, int(affordable) // self._chunk) * self._chunk
