"""Decode steps of a model with random KV: ours over a shared prefix, stock without one, replicated.

All three run in the same pipeline, a step ahead of the tokens that are read, and sample greedily.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache
from mlx_lm.sample_utils import greedy_sampler

from mlx_swarm.broker.cache.extents import Extent
from mlx_swarm.broker.cache.layout import Layout, TokenLeaf, dtype_of
from mlx_swarm.broker.cache.segments import Segment
from mlx_swarm.broker.engine.decode_batch import DecodeBatch
from mlx_swarm.broker.engine.seat import Seat, zero_states
from mlx_swarm.broker.engine.sharing import Piece

WARM_STEPS = 4


def tail_lengths(rows: int, mean: int) -> list[int]:
    """Ragged tails: from half of the mean to one and a half of it."""
    return [mean // 2 + (37 * row) % (mean + 1) for row in range(rows)]


def shared_steps(
    model: Any, layout: Layout, rows: int, shared: int, *, tail: int, steps: int
) -> Callable[[], float]:
    """Milliseconds of a step of a `DecodeBatch`, everything that it does included."""
    extent = _extent(layout, shared) if shared else None

    def measure() -> float:
        batch = DecodeBatch(model, layout)
        for row, length in enumerate(tail_lengths(rows, tail)):
            batch.add(_seat(layout, extent, shared, length, row, steps))
        batch.step()
        return _timed(batch.step, steps)

    return measure


def stock_steps(
    model: Any, layout: Layout, rows: int, *, tail: int, steps: int
) -> Callable[[], float]:
    """Milliseconds of a stock step without a prefix, equal tails and no mask: its best case."""

    def measure() -> float:
        caches = [KVCache() for _ in layout.leaves]
        for cache, leaf in zip(caches, layout.leaves, strict=True):
            assert isinstance(leaf, TokenLeaf)
            cache.update_and_fetch(*_random(leaf, rows, tail))
        mx.eval([cache.state for cache in caches])
        return _timed(_Loop(model, caches, rows).step, steps)

    return measure


def replicated_steps(
    model: Any, layout: Layout, rows: int, shared: int, *, tail: int, steps: int
) -> Callable[[], float]:
    """Milliseconds of a step of mlx-lm's batch caches, the prefix in every row."""

    def measure() -> float:
        lengths = tail_lengths(rows, tail)
        caches = [BatchKVCache([max(lengths) - n for n in lengths]) for _ in layout.leaves]
        for cache, leaf in zip(caches, layout.leaves, strict=True):
            assert isinstance(leaf, TokenLeaf)
            cache.update_and_fetch(*_random(leaf, rows, shared + max(lengths)))
            mx.eval(cache.keys, cache.values)
        milliseconds = _timed(_Loop(model, caches, rows).step, steps)
        del caches
        mx.clear_cache()
        return milliseconds

    return measure


class _Loop:
    """The bare loop around a model: the next step is dispatched before the last one is read."""

    def __init__(self, model: Any, caches: Sequence[Any], rows: int) -> None:
        self._model = model
        self._caches = caches
        self._tokens = mx.array([(7 * row) % 200 for row in range(rows)])

    def step(self) -> Any:
        before = self._tokens
        logits = self._model(before[:, None], cache=self._caches)[:, -1, :]
        self._tokens = mx.argmax(logits, axis=-1)
        mx.async_eval(self._tokens)
        return before.tolist()


def _timed(step: Callable[[], Any], steps: int) -> float:
    """Milliseconds of a step, over as many as asked for, after some that are not counted."""
    for _ in range(WARM_STEPS):
        step()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return 1e3 * (time.perf_counter() - start) / steps


def _seat(
    layout: Layout, extent: Extent | None, shared: int, length: int, row: int, steps: int
) -> Seat:
    segments = [
        [Segment.over(shared, shared + length, _random(leaf, 1, length))]
        if isinstance(leaf, TokenLeaf)
        else []
        for leaf in layout.leaves
    ]
    return Seat(
        [Piece(extent, 0, shared)] if extent is not None else [],
        segments,
        zero_states(layout),
        length=shared + length,
        token=(7 * row) % 200,
        max_tokens=steps + 2 * WARM_STEPS,
        sampler=greedy_sampler,
    )


def _extent(layout: Layout, tokens: int) -> Extent:
    buffers = []
    for group in layout.groups:
        shape = (len(group.members), group.plane.heads, tokens, group.plane.dim)
        buffers.append(mx.random.normal(shape, dtype_of(group.plane.dtype)))
        mx.eval(buffers[-1])
    return Extent(layout, 0, tokens, tuple(buffers), (((0, tokens),),) * len(buffers))


def _random(leaf: TokenLeaf, rows: int, tokens: int) -> tuple[mx.array, mx.array]:
    keys, values = (
        mx.random.normal((rows, plane.heads, tokens, plane.dim), dtype_of(plane.dtype))
        for plane in leaf.planes
    )
    return keys, values
