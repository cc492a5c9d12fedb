"""How many prompt tokens to compute at once, by how long they and decode steps take. No MLX."""

import statistics
from collections import deque

LONGEST = 8192
"""Tokens computed at once at most, whatever the speed."""

GRAIN = 256
"""Chunks are multiples of this, so that few lengths are seen."""

FINE_GRAIN = 32
"""Chunks below `GRAIN` are multiples of this: machines that are so slow see few lengths anyhow."""

FREE_SECONDS = 0.5
"""What prefill may take at once while nothing decodes: a cancellation waits for so long."""

GAP = 3.5
"""A running row waits for its next token, with a chunk between, so many steps at most."""

REMEMBERED = 8
"""Pieces and steps that are looked back at."""


class Pace:
    """Sizes chunks by time, or always gives `fixed` tokens; `first` until something is known."""

    def __init__(self, first: int, fixed: int | None = None) -> None:
        self._first = first
        self._fixed = fixed
        self._rates: deque[float] = deque(maxlen=REMEMBERED)
        self._steps: deque[float] = deque(maxlen=REMEMBERED)
        self._stepped = False

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """A piece of so many tokens took so long, decode steps in between included."""
        if self._stepped and self._steps:
            seconds = max(seconds - self._step(), seconds / 4)
        self._stepped = False
        if seconds > 0:
            self._rates.append(tokens / seconds)

    def note_step(self, seconds: float) -> None:
        """A decode step took so long, from its dispatch to the tokens of the step before it."""
        self._stepped = True
        self._steps.append(seconds)

    def chunk(self, *, decoding: bool) -> int:
        """Tokens to compute at once; with `decoding`, until the next decode step."""
        if self._fixed is not None:
            return self._fixed
        if not decoding:
            # The fastest of the last pieces: others may have had kernels to load first.
            return self._rounded(max(self._rates, default=0.0) * FREE_SECONDS, self._first)
        if not self._rates or not self._steps:
            return self._first
        affordable = statistics.median(list(self._rates)[-3:]) * (GAP - 1) * self._step()
        return self._rounded(affordable, FINE_GRAIN)

    def _step(self) -> float:
        return statistics.median(self._steps)

    def _rounded(self, tokens: float, least: int) -> int:
        grain = GRAIN if tokens >= GRAIN else FINE_GRAIN
        return max(least, int(min(tokens, LONGEST)) // grain * grain)
