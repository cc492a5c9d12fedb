"""KV that is only counted: a byte stands for a token, so that the real cache can hold millions.

Everything that the cache is told in bytes (its budget, the ledger's limit) is in tokens here.
"""

import mlx.core as mx

from mlx_swarm.broker.cache.extents import Extent
from mlx_swarm.broker.cache.kinds import Checkpoint
from mlx_swarm.broker.cache.layout import Layout, Plane, TokenLeaf
from mlx_swarm.broker.cache.runs import Runs

LAYOUT = Layout((TokenLeaf("KVCache", (Plane("uint8", 1, 1),)),))
"""One layer that keeps one byte a token."""


class CountedRow:
    """A row of `length` tokens as `PromptCache.put` takes it."""

    layout = LAYOUT

    def __init__(self, length: int, start: int = 0) -> None:
        self.length = length
        self._start = start

    def held(self) -> tuple[Runs, ...]:
        """All positions, or those from `start` on."""
        return (((self._start, self.length),),)

    def cut(self, start: int, stop: int) -> Extent:
        """An extent whose buffer is never computed."""
        buffer = mx.zeros((1, 1, stop - start, 1), mx.uint8)
        return Extent(LAYOUT, start, stop, (buffer,), (((start, stop),),))

    def checkpoint(self) -> Checkpoint | None:
        """It has no state."""
        return None
