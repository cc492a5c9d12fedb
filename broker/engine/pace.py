"""How many prompt tokens to compute at once, by how long they and decode steps take. No MLX."""

import statistics
from collections import deque

LONGEST = 8192
"""Tokens computed at once at most, whatever the speed."""

LEAST = 32
"""Tokens computed at once at least: fewer are not faster."""

LEAST_CUDA = 512
"""The same with CUDA, where MLX prepares its attention for every new length, for 50 ms: many small
chunks take longer than their tokens."""

SLACK = 4 / 3
"""Chunks are powers of two, so that few lengths are seen; of the two nearest the larger one is
chosen if it is not longer than affordable by more than this: it computes faster too."""

FREE_SECONDS = 0.5
"""What prefill may take at once while nothing decodes: a cancellation waits for so long."""

GAP = 3.5
"""A running row waits for its next token, with a chunk between, so many steps at most."""

REMEMBERED = 8
"""Pieces and steps that are looked back at."""

RECENT = 3
"""Pieces that tell how fast a prompt is computed at its present length."""


class Pace:
    """Sizes chunks by time, or always gives `fixed` tokens; `first` until something is known, and
    never less than `least`.
    """

    def __init__(self, first: int, fixed: int | None = None, least: int = LEAST) -> None:
        self._first = first
        self._fixed = fixed
        self._least = least
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

    @property
    def rate(self) -> float:
        """Prompt tokens computed in a second; 0 before anything was."""
        return statistics.median(self._rates) if self._rates else 0.0

    def chunk(self, *, decoding: bool) -> int:
        """Tokens to compute at once; with `decoding`, until the next decode step."""
        if self._fixed is not None:
            return self._fixed
        if not decoding:
            # The fastest of the last pieces: others may have had kernels to load first.
            return self._sized(max(self._rates, default=0.0) * FREE_SECONDS, self._first)
        if not self._rates or not self._steps:
            return self._first
        rate = statistics.median(list(self._rates)[-RECENT:])
        return self._sized(rate * (GAP - 1) * self._step() * SLACK, self._least)

    def _step(self) -> float:
        return statistics.median(self._steps)

    def _sized(self, tokens: float, least: int) -> int:
        return max(least, 1 << int(min(max(tokens, 1), LONGEST)).bit_length() - 1)
