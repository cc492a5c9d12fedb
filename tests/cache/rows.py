"""Real mlx-lm cache objects without a model: every row depends on all tokens up to its own.

`advance` does what a model's forward pass does to its caches; `contents` reads what they hold back
as numpy, whatever the class, so that two caches can be compared byte by byte.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_swarm.broker.cache.clones import Clone

HEADS, KEY_DIM, VALUE_DIM = 2, 8, 4
WINDOW = 8
UNUSED_SLOT = 2
"""The slot that no layer fills."""

Array = np.ndarray[Any, Any]


class Rows(NamedTuple):
    """What a layer holds of a run of tokens: `positions`, planes of [heads, tokens, dim]."""

    positions: Array
    planes: tuple[Array, ...]


class State(NamedTuple):
    """What a layer holds that cannot be cut along tokens."""

    slots: tuple[Array | None, ...]


Content = Rows | State

FAMILIES: dict[str, Callable[[], list[Any]]] = {
    "full": lambda: [KVCache(), KVCache()],
    "concatenate": lambda: [ConcatenateKVCache(), KVCache()],
    "quantized": lambda: [QuantizedKVCache(group_size=32, bits=8), QuantizedKVCache(32, 4)],
    "quantized_oddly": lambda: [QuantizedKVCache(64, 3), QuantizedKVCache(128, 2), KVCache()],
    "window": lambda: [KVCache(), RotatingKVCache(max_size=WINDOW)],
    "window_keep": lambda: [RotatingKVCache(WINDOW, keep=3), RotatingKVCache(WINDOW + 3)],
    "chunked": lambda: [ChunkedKVCache(WINDOW), KVCache()],
    "state": lambda: [ArraysCache(2), KVCache()],
    "state_only": lambda: [ArraysCache(2)],
    "nested": lambda: [CacheList(KVCache(), ArraysCache(1)), KVCache()],
    "nested_twice": lambda: [
        CacheList(CacheList(RotatingKVCache(WINDOW, keep=1), ArraysCache(3)), KVCache()),
        ArraysCache(1),
    ],
}
STATEFUL = frozenset({"state", "state_only", "nested", "nested_twice"})
"""The families that serve only lengths with a checkpoint."""


def advance(caches: Sequence[Any], tokens: Sequence[int], start: int) -> None:
    """Append the rows of tokens [start, len(tokens)) to every layer, as a forward pass would."""
    states = prefix_states(tokens)
    for layer, cache in enumerate(_leaves(caches)):
        if isinstance(cache, ArraysCache) or hasattr(cache, "cache"):
            for slot in {*range(len(cache.cache))} - {UNUSED_SLOT}:
                cache[slot] = mx.array(state_row(states[-1], layer, slot))
            continue
        if hasattr(cache, "maybe_trim_front"):
            cache.maybe_trim_front()
        dims = _dims(cache)
        keys = rows_of(states[start:], layer, 0, dims[0])
        values = rows_of(states[start:], layer, 1, dims[1])
        cache.update_and_fetch(mx.array(keys)[None], mx.array(values)[None])


def build(family: str, tokens: Sequence[int], chunk: int = 5) -> list[Any]:
    """The caches of a model that has just computed `tokens`, `chunk` at a time."""
    caches = FAMILIES[family]()
    for start in range(0, len(tokens), chunk):
        advance(caches, tokens[: start + chunk], start)
    return caches


def contents(caches: Sequence[Any]) -> list[Content]:
    """What caches hold, stock or clones, flattened, in order of the tokens, as numpy arrays."""
    return [_content(cache) for cache in _leaves(caches)]


def prefix_states(tokens: Sequence[int]) -> Array:
    """A number per token that depends on all tokens up to it. [tokens] uint64"""
    state, states = 0x9E3779B97F4A7C15, []
    for token in tokens:
        state = ((state ^ (int(token) + 1)) * 0xD6E8FEB86659FD93 + 0x632BE5AB) % 2**64
        states.append(state ^ (state >> 29))
    return np.array(states, dtype=np.uint64)


def logprobs_of(tokens: Sequence[int]) -> Array:
    """A log-probability per token, which depends on all tokens up to it. [tokens] float32"""
    states = prefix_states(tokens)
    logprobs = -(states % np.uint64(4096)).astype(np.float32) / 256
    logprobs[:1] = 0.0
    return logprobs


def rows_of(states: Array, layer: int, plane: int, dim: int) -> Array:
    """Rows that depend on a token's state, its layer and its plane. [heads, tokens, dim] float32"""
    salt = np.arange(HEADS * dim, dtype=np.uint64).reshape(HEADS, 1, dim)
    salt = salt * np.uint64(2654435761) + np.uint64(layer * 977 + plane * 131071)
    mixed = (states[None, :, None] + salt) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed >> np.uint64(48)).astype(np.float32) - 32768.0) / 4096.0


def state_row(state: np.uint64, layer: int, slot: int) -> Array:
    """A recurrent state of one layer after the token whose number is `state`. [1, 3, 4] float32"""
    return rows_of(np.array([state]), layer, 7 + slot, 6).reshape(1, 3, 4)


def same(left: Content, right: Content) -> bool:
    """Whether two layers hold the same bytes; rows are compared where both hold them."""
    if isinstance(left, State) or isinstance(right, State):
        return (
            isinstance(left, State)
            and isinstance(right, State)
            and len(left.slots) == len(right.slots)
            and all(_equal(a, b) for a, b in zip(left.slots, right.slots, strict=True))
        )
    shared, at_left, at_right = np.intersect1d(left.positions, right.positions, return_indices=True)
    return len(left.planes) == len(right.planes) and all(
        _equal(a[:, at_left], b[:, at_right])
        for a, b in zip(left.planes, right.planes, strict=True)
        if len(shared)
    )


def _leaves(caches: Sequence[Any]) -> list[Any]:
    flat: list[Any] = []
    for cache in caches:
        nested = getattr(cache, "caches", None)
        flat.extend(_leaves(nested) if nested is not None else [cache])
    return flat


def _dims(cache: Any) -> tuple[int, int]:
    if isinstance(cache, QuantizedKVCache) or hasattr(cache, "bits"):
        return cache.group_size, cache.group_size
    return KEY_DIM, VALUE_DIM


def _content(cache: Any) -> Content:
    if isinstance(cache, ArraysCache):
        return State(tuple(None if slot is None else np.array(slot) for slot in cache.cache))
    if isinstance(cache, Clone):
        return _segments(cache)
    if cache.keys is None:
        return Rows(np.arange(0), ())
    if isinstance(cache, RotatingKVCache):
        return _rotating(cache)
    first = cache.start_position if isinstance(cache, ChunkedKVCache) else 0
    planes = [*_planes(cache.keys), *_planes(cache.values)]
    held = cache.offset - first
    return Rows(np.arange(first, cache.offset), tuple(p[:, :held] for p in planes))


def _segments(cache: Clone) -> Rows:
    parts = cache.segments()
    positions = [np.arange(part.start, part.stop) for part in parts]
    planes = zip(*(part.planes for part in parts), strict=True)
    joined = (np.concatenate([np.array(each)[0] for each in plane], axis=1) for plane in planes)
    return Rows(np.concatenate(positions), tuple(joined))


def _rotating(cache: RotatingKVCache) -> Rows:
    planes = [_ordered(cache, plane) for plane in (cache.keys, cache.values)]
    held = planes[0].shape[1]
    if cache.offset == held or cache.keep == 0:
        return Rows(np.arange(cache.offset - held, cache.offset), tuple(planes))
    recent = np.arange(cache.offset - (held - cache.keep), cache.offset)
    return Rows(np.concatenate([np.arange(cache.keep), recent]), tuple(planes))


def _ordered(cache: RotatingKVCache, plane: mx.array) -> Array:
    rows: Array = np.array(plane)[0]
    if cache._idx == rows.shape[1]:
        return rows
    if cache._idx < cache.offset:
        keep, at = cache.keep, cache._idx
        return np.concatenate([rows[:, :keep], rows[:, at:], rows[:, keep:at]], axis=1)
    held: Array = rows[:, : cache._idx]
    return held


def _planes(side: Any) -> list[Array]:
    parts = side if isinstance(side, list | tuple) else [side]
    return [np.array(part)[0] for part in parts]


def _equal(left: Array | None, right: Array | None) -> bool:
    if left is None or right is None:
        return left is right
    return bool(left.dtype == right.dtype and np.array_equal(left, right))
