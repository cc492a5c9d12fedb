"""A thousand clones of one large entry: what a clone costs in time and bytes, and its first token.

mlx-lm's `LRUPromptCache` stands beside: it clones with `copy.deepcopy`, which shares buffers until
the first write copies each of them whole.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, LRUPromptCache

from bench.runner import Comparison, compare
from mlx_swarm.broker.cache.prompt_cache import PromptCache
from mlx_swarm.broker.engine.attention import dispatch

LAYERS, HEADS, QUERY_HEADS, DIM = 30, 3, 9, 64
TOKENS = 2_176
"""With SmolLM2-135M's shapes in float32, 100 MB of KV."""

CLONES = 1_000
RUNNING = 16
"""Clones that decode at once where each copies the whole entry: 16 of 100 MB."""


class Donor:
    """One entry in both caches, and a prompt that goes on where it ends."""

    def __init__(self) -> None:
        key = list(range(TOKENS))
        self.prompt = [*key, TOKENS]
        self.ours = PromptCache(4 << 30)
        self.theirs = LRUPromptCache()
        caches = _filled()
        self.ours.put(key, caches)
        self.theirs.insert_cache("model", key, caches)
        self.nbytes = self.ours.total_bytes

    def take(self) -> list[Any]:
        """A clone of ours; the lease is given back at once, the caches go on."""
        lease = self.ours.take(self.prompt)
        assert lease is not None
        caches = lease.caches
        lease.release()
        return caches

    def fetch(self) -> list[Any]:
        """A clone of mlx-lm's."""
        caches, rest = self.theirs.fetch_nearest_cache("model", self.prompt)
        assert caches is not None
        assert len(rest) == 1
        return list(caches)


def comparisons(repeats: int) -> list[Comparison]:
    """Time of a clone, time to its first token, bytes of a clone then and before."""
    donor = Donor()
    take, fetch = donor.take, donor.fetch
    size = f"of {donor.nbytes / 1e6:.0f} MB"
    return [
        compare(
            f"seconds for {CLONES:,} clones {size}",
            {"mlx-swarm": lambda: _many(take), "mlx-lm": lambda: _many(fetch)},
            repeats=repeats,
        ),
        compare(
            f"seconds from a prompt to the attention of its first token, clone {size}",
            {"mlx-swarm": lambda: _first_token(take()), "mlx-lm": lambda: _first_token(fetch())},
            repeats=2 * repeats + 1,
        ),
        compare(
            f"bytes that {CLONES:,} clones {size} add before they decode (at least 1)",
            {"mlx-swarm": lambda: _held(take, CLONES), "mlx-lm": lambda: _held(fetch, CLONES)},
            unit="bytes",
            warmup=0,
            repeats=1,
        ),
        compare(
            f"bytes that each of {RUNNING} clones {size} adds with its first token",
            {
                "mlx-swarm": lambda: _held(take, RUNNING, _first_token) / RUNNING,
                "mlx-lm": lambda: _held(fetch, RUNNING, _first_token) / RUNNING,
            },
            unit="bytes",
            warmup=0,
            repeats=1,
        ),
    ]


def _filled() -> list[KVCache]:
    caches = []
    for _ in range(LAYERS):
        cache = KVCache()
        plane = mx.random.normal((1, HEADS, TOKENS, DIM))
        cache.update_and_fetch(plane, plane + 1)
        mx.eval(cache.state)
        caches.append(cache)
    return caches


def _many(clone: Callable[[], list[Any]]) -> None:
    for _ in range(CLONES):
        clone()


def _first_token(caches: list[Any]) -> None:
    """Append a token to every layer and attend to all of them, as a decode step does."""
    query = mx.ones((1, QUERY_HEADS, 1, DIM))
    token = mx.ones((1, HEADS, 1, DIM))
    for cache in caches:
        keys, values = cache.update_and_fetch(token, token)
        query = dispatch(query, keys, values, cache, DIM**-0.5, None)
    mx.eval(query, [cache.state for cache in caches])


def _held(
    clone: Callable[[], list[Any]], count: int, use: Callable[[list[Any]], None] | None = None
) -> float:
    """Bytes that MLX holds more while `count` clones are alive, after `use` of each."""
    mx.clear_cache()
    before = mx.get_active_memory()
    alive = []
    for _ in range(count):
        caches = clone()
        if use is not None:
            use(caches)
        alive.append(caches)
    return float(max(mx.get_active_memory() - before, 1))
