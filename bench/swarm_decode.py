"""Decode loops over random KV: ours, stock without a prefix, mlx-lm with the prefix in every row.

All run in the same pipeline, a step ahead of the tokens that are read, and sample greedily. What
measures returns milliseconds a step; what is made before is made anew every time and not counted.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache
from mlx_lm.sample_utils import greedy_sampler

from bench.swarm_setup import Setup
from mlx_swarm.broker.cache.dtypes import dtype_of
from mlx_swarm.broker.cache.extents import Extent
from mlx_swarm.broker.cache.layout import TokenLeaf
from mlx_swarm.broker.cache.segments import Segment
from mlx_swarm.broker.engine import shared_attention
from mlx_swarm.broker.engine.decode_batch import DecodeBatch
from mlx_swarm.broker.engine.seat import Seat, zero_states
from mlx_swarm.broker.engine.shared_attention import FUSED, SCORES, Geometry, Implementation
from mlx_swarm.broker.engine.sharing import Piece

WARM_STEPS = 4

Measure = Callable[[], float]
Path = list[Piece]


def tail_lengths(rows: int, mean: int) -> list[int]:
    """Ragged tails: from half of the mean to one and a half of it."""
    return [mean // 2 + (37 * row) % (mean + 1) for row in range(rows)]


def shared_steps(
    setup: Setup, paths: Sequence[Path], tails: Sequence[int], steps: int, max_spans: int = 1
) -> Measure:
    """A step of a `DecodeBatch`, everything that it does included."""

    def measure() -> float:
        batch = fill(setup, paths, tails, steps + 2 * WARM_STEPS, max_spans)
        batch.step()
        return _timed(batch.step, steps)

    return measure


def plain_steps(
    setup: Setup, paths: Sequence[Path], tails: Sequence[int], steps: int, max_spans: int = 1
) -> Measure:
    """The same with plain operations instead of the kernels."""
    usual = shared_steps(setup, paths, tails, steps, max_spans)

    def measure() -> float:
        with _plain_operations():
            return usual()

    return measure


def stock_steps(setup: Setup, rows: int, tail: int, steps: int) -> Measure:
    """A stock step without a prefix, equal tails and no mask: its best case."""

    def measure() -> float:
        caches = [KVCache() for _ in setup.layout.leaves]
        for cache, leaf in zip(caches, setup.layout.leaves, strict=True):
            cache.update_and_fetch(*_random(leaf, rows, tail))
        mx.eval([cache.state for cache in caches])
        return _timed(_Loop(setup.loaded.model, caches, rows).step, steps)

    return measure


def replicated_steps(setup: Setup, shared: int, tails: Sequence[int], steps: int) -> Measure:
    """A step of mlx-lm's batch caches, the prefix in every row."""

    def measure() -> float:
        padding = [max(tails) - tail for tail in tails]
        caches = [BatchKVCache(padding) for _ in setup.layout.leaves]
        for cache, leaf in zip(caches, setup.layout.leaves, strict=True):
            cache.update_and_fetch(*_random(leaf, len(tails), shared + max(tails)))
            mx.eval(cache.keys, cache.values)
        milliseconds = _timed(_Loop(setup.loaded.model, caches, len(tails)).step, steps)
        del caches
        mx.clear_cache()
        return milliseconds

    return measure


def fill(
    setup: Setup, paths: Sequence[Path], tails: Sequence[int], tokens: int, max_spans: int = 1
) -> DecodeBatch:
    """A batch whose rows read these paths and have tails of these lengths."""
    batch = DecodeBatch(setup.loaded.model, setup.layout, max_spans=max(1, max_spans))
    longest = max(1, *tails)
    buffers = [_random(leaf, 1, longest) for leaf in setup.layout.leaves]
    mx.eval(buffers)
    for row, (path, tail) in enumerate(zip(paths, tails, strict=True)):
        start = path[-1].stop if path else 0
        seat = Seat(
            path,
            [[Segment.over(start, start + tail, planes)] for planes in buffers],
            zero_states(setup.layout),
            length=start + tail,
            token=_token(row),
            max_tokens=tokens,
            sampler=greedy_sampler,
        )
        batch.add(seat)
    return batch


def prefix_path(setup: Setup, tokens: int) -> Path:
    """A prefix of random KV, one extent; none for 0 tokens."""
    if not tokens:
        return []
    buffers = []
    for group in setup.layout.groups:
        shape = (len(group.members), group.plane.heads, tokens, group.plane.dim)
        buffers.append(mx.random.normal(shape, dtype_of(group.plane.dtype)))
        mx.eval(buffers[-1])
    extent = Extent(setup.layout, 0, tokens, tuple(buffers), (((0, tokens),),) * len(buffers))
    return [Piece(extent, 0, tokens)]


class _Loop:
    """The bare loop around a model: the next step is dispatched before the last one is read."""

    def __init__(self, model: Any, caches: Sequence[Any], rows: int) -> None:
        self._model = model
        self._caches = caches
        self._tokens = mx.array([_token(row) for row in range(rows)])

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
    milliseconds = 1e3 * (time.perf_counter() - start) / steps
    # One step is still on its way: it must not run into what is measured next.
    mx.synchronize()
    return milliseconds


@contextmanager
def _plain_operations() -> Iterator[None]:
    usual = shared_attention.implementation

    def plain(geometry: Geometry, spans: int = 1) -> Implementation:
        # Fused attention is too coarse in float16, and pays on a GPU only.
        fused = geometry.dtype == "bfloat16"
        return Implementation(FUSED if fused else SCORES, "asked for")

    shared_attention.implementation = plain
    try:
        yield
    finally:
        shared_attention.implementation = usual


def _token(row: int) -> int:
    return (7 * row) % 200


def _random(leaf: Any, rows: int, tokens: int) -> tuple[mx.array, mx.array]:
    assert isinstance(leaf, TokenLeaf)
    keys, values = (
        mx.random.normal((rows, plane.heads, tokens, plane.dim), dtype_of(plane.dtype))
        for plane in leaf.planes
    )
    return keys, values
