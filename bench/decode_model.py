"""Decode steps of a Llama-shaped model with random weights: stock, replicated, shared prefix."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models import llama
from mlx_lm.models.cache import BatchKVCache, KVCache

from mlx_swarm.broker.engine.shared_attention import (
    DecodePlan,
    Group,
    Span,
    Tails,
    decode_attention,
    plain_attention,
)

TAIL_ROOM = 256
STOCK = llama.scaled_dot_product_attention


class Shape(NamedTuple):
    """The sizes of a model that a decode step depends on."""

    name: str
    hidden: int
    layers: int
    mlp: int
    heads: int
    kv_heads: int
    vocabulary: int
    dtype: mx.Dtype

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads


LLAMA_8B = Shape("Llama-3-8B", 4096, 32, 14336, 32, 8, 128256, mx.bfloat16)
SMALL = Shape("small", 512, 4, 1024, 8, 2, 4096, mx.float32)


class Steps(NamedTuple):
    """Two ways to time steps of one contender, in milliseconds a step."""

    each: Callable[[], float]
    pipelined: Callable[[], float]


class Batch:
    """What all layers of a running batch share: the plan, and how to attend."""

    def __init__(self, groups: Sequence[Group], lengths: Sequence[int], name: str) -> None:
        self.name = name
        self.first = DecodePlan(groups, lengths)
        self.rows = len(lengths)
        self.prefix = sum(group.length for group in groups)
        self.restart()

    def restart(self) -> None:
        """Back to the first lengths."""
        self.plan = self.first
        self._place()

    def step(self) -> None:
        """Every row gets one token."""
        self.plan = self.plan.advance()
        self._place()

    def _place(self) -> None:
        last = self.plan.lengths - 1
        self.offset = last + self.prefix
        self.last = last[:, None, None, None]


class SharedCache:
    """One layer of a batch over shared spans, as mlx-lm's models see it."""

    def __init__(self, batch: Batch, spans: list[Span], tails: Tails) -> None:
        self.batch, self.spans = batch, spans
        self.keys, self.values = tails

    @property
    def offset(self) -> mx.array:
        return self.batch.offset

    def make_mask(self, *_: Any, **__: Any) -> None:
        return None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        # On CUDA ten times cheaper than assigning at the indices of rows and lengths.
        place = mx.broadcast_to(self.batch.last, keys.shape)
        self.keys = mx.put_along_axis(self.keys, place, keys, axis=2)
        self.values = mx.put_along_axis(self.values, place, values, axis=2)
        return self.keys, self.values

    def attend(self, queries: mx.array, scale: float) -> mx.array:
        tails, plan = Tails(self.keys, self.values), self.batch.plan
        if self.batch.name == "kernel":
            return decode_attention(queries, self.spans, tails, plan, scale=scale)
        return plain_attention(queries, self.spans, tails, plan, scale, None, self.batch.name)

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        return self.keys, self.values


def build(shape: Shape) -> Any:
    """The model; every matmul reads random weights."""
    arguments = llama.ModelArgs(
        model_type="llama",
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        intermediate_size=shape.mlp,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        rms_norm_eps=1e-5,
        vocab_size=shape.vocabulary,
        rope_theta=5e5,
        tie_word_embeddings=False,
    )
    model = llama.Model(arguments)

    def weights(old: mx.array) -> mx.array:
        if old.ndim == 1:
            return mx.ones(old.shape, shape.dtype)
        return (mx.random.normal(old.shape) * 0.02).astype(shape.dtype)

    model.update(tree_map(weights, model.parameters()))
    mx.eval(model.parameters())
    llama.scaled_dot_product_attention = _dispatch
    return model


def random_spans(shape: Shape, tokens: int) -> list[Span]:
    """A shared prefix: one span a layer."""
    spans = [Span(*_random_pair(shape, shape.kv_heads, tokens)) for _ in range(shape.layers)]
    mx.eval(spans)
    return spans


def tail_lengths(rows: int) -> list[int]:
    """Ragged tails of 64 to 192 tokens, 128 on average."""
    return [64 + (37 * row) % 129 for row in range(rows)]


def shared_step(model: Any, shape: Shape, rows: int, spans: list[Span] | None, name: str) -> Steps:
    """Times steps of `rows` rows with ragged tails over one shared prefix (None: without)."""
    tokens = spans[0].keys.shape[1] if spans else 0
    groups = [Group(range(rows), tokens)] if spans else []
    batch = Batch(groups, tail_lengths(rows), name)
    caches = [
        SharedCache(
            batch,
            [spans[layer]] if spans else [],
            Tails(*_random_pair(shape, rows, shape.kv_heads, TAIL_ROOM)),
        )
        for layer in range(shape.layers)
    ]
    mx.eval([cache.state for cache in caches])
    return _steps(model, caches, rows, batch.restart, batch.step)


def stock_step(model: Any, shape: Shape, rows: int) -> Steps:
    """Times stock steps without a prefix, on equal tails of 128 tokens: no mask, its best case."""
    caches = []
    for _ in range(shape.layers):
        cache = KVCache()
        cache.update_and_fetch(*_random_pair(shape, rows, shape.kv_heads, 128))
        caches.append(cache)
    mx.eval([cache.state for cache in caches])

    def restart() -> None:
        for cache in caches:
            cache.offset = 128

    return _steps(model, caches, rows, restart, lambda: None)


def replicated_step(model: Any, shape: Shape, rows: int, tokens: int) -> Steps:
    """Times mlx-lm's batch cache with the prefix copied into every row, tails ragged."""
    lengths = tail_lengths(rows)
    caches = []
    for _ in range(shape.layers):
        cache = BatchKVCache([max(lengths) - length for length in lengths])
        cache.update_and_fetch(*_random_pair(shape, rows, shape.kv_heads, tokens + max(lengths)))
        mx.eval(cache.state[:2])
        caches.append(cache)
    start = caches[0].offset, caches[0]._idx

    def restart() -> None:
        for cache in caches:
            cache.offset, cache._idx = start

    return _steps(model, caches, rows, restart, lambda: None, count=2)


def _steps(
    model: Any,
    caches: Sequence[Any],
    rows: int,
    restart: Callable[[], None],
    before: Callable[[], None],
    count: int = 8,
) -> Steps:
    """Both ways: each step evaluated before the next is built, and the next built meanwhile."""
    first = mx.array([(7 * row) % 1000 for row in range(rows)])

    def step(tokens: mx.array) -> mx.array:
        before()
        return mx.argmax(model(tokens[:, None], cache=caches)[:, -1, :], axis=-1)

    def state() -> list[Any]:
        return [cache.state[:2] for cache in caches]

    def each() -> float:
        restart()
        tokens, taken = first, []
        for _ in range(count + 2):
            start = time.perf_counter()
            tokens = step(tokens)
            mx.eval(tokens, state())
            taken.append(time.perf_counter() - start)
        return 1e3 * sorted(taken[2:])[count // 2]

    def pipelined() -> float:
        restart()
        tokens, start = first, 0.0
        for turn in range(count + 2):
            if turn == 2:
                mx.eval(tokens)
                start = time.perf_counter()
            tokens = step(tokens)
            mx.async_eval(tokens, state())
        mx.eval(tokens)
        return 1e3 * (time.perf_counter() - start) / count

    return Steps(each, pipelined)


def _random_pair(shape: Shape, *sizes: int) -> tuple[mx.array, mx.array]:
    size = (*sizes, shape.head_size)
    return tuple(mx.random.normal(size).astype(shape.dtype) for _ in range(2))  # type: ignore[return-value]


def _dispatch(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> Any:
    if isinstance(cache, SharedCache):
        return cache.attend(queries, scale)
    return STOCK(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
