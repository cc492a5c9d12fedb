"""Dispatching ahead: while the device computes one piece of work, the next is being built."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

from .prompt_logprobs import gather
from .row import Row

TILE_ALONE = 2048
"""Prompt tokens of one call of the model for one row, which ends at a multiple of it: with CUDA,
MLX prepares its attention for every length that it has not seen.
"""

TILE_TOGETHER = 4096
"""The same for rows in the batch, over all of them."""

AT_ONCE = 2e-4
"""Seconds in which nothing was waited for."""


class Ahead:
    """Keeps at most one piece of prefill under way on the device when `start` returns.

    `on_done` hears of pieces in their order, each when a later one is started: its tokens and the
    seconds that it took, counted from when the device was free for it.
    """

    def __init__(
        self, on_done: Callable[[int, float], None] = lambda tokens, seconds: None
    ) -> None:
        self._on_done = on_done
        self._under_way: _Piece | None = None
        self._free_at = 0.0

    def start(self, results: Sequence[mx.array], tokens: int) -> None:
        """Dispatch a piece that computes `tokens` into `results`; wait for the piece before it."""
        begun = time.perf_counter()
        # A copy of one number: a reference to a result would keep it from being written in place.
        mark = results[-1][(slice(0, 1),) * results[-1].ndim].astype(mx.float32) + 0
        mx.async_eval(*results, mark)
        before, self._under_way = self._under_way, _Piece(mark, tokens, begun)
        if before is not None:
            dispatched = time.perf_counter()
            mx.eval(before.mark)
            done = time.perf_counter()
            self._on_done(before.tokens, done - max(before.begun, self._free_at))
            # Without a wait it was done before, and this piece may be under way since it was begun.
            self._free_at = done if done - dispatched > AT_ONCE else begun

    def compute(self, model: Any, row: Row, stop: int) -> None:
        """Start computing a row's tokens up to `stop` into its own caches, piece by piece, and the
        log-probabilities of the prompt if it asks for them.
        """
        asked = row.asking
        size = TILE_ALONE if asked is None else min(TILE_ALONE, asked.tile)
        for start, end in pieces(row.position, stop, size):
            logits = model(mx.array(row.sequence[start:end])[None], cache=row.caches)
            gathered = gather(logits[0], [(asked, start, end - start)]) if asked else []
            del logits
            self.start([*gathered, *arrays_of(row.caches)], end - start)
        row.position = stop


def pieces(start: int, stop: int, size: int = TILE_ALONE) -> Iterator[tuple[int, int]]:
    """[start, stop) in pieces that end at multiples of `size`, but for the last."""
    return pairwise([start, *range((start // size + 1) * size, stop, size), stop])


def arrays_of(caches: Sequence[Any]) -> list[mx.array]:
    """Everything that a step leaves in cache objects."""
    leaves: Any = tree_flatten([cache.state for cache in caches])
    return [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]


class _Piece(NamedTuple):
    mark: mx.array
    tokens: int
    begun: float
