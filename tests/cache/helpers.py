"""Short forms for tests of the prompt cache."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from mlx_swarm.broker.cache.kinds import materialise
from mlx_swarm.broker.cache.lease import PromptLease
from mlx_swarm.broker.cache.prompt_cache import PromptCache, Stored
from tests.cache.rows import advance, build, contents, same

TOKEN_BYTES = 192
"""Bytes of a token in the family `full`."""


def put(
    cache: PromptCache, tokens: Sequence[int], family: str = "full", namespace: str = ""
) -> Stored:
    """Compute a sequence from nothing and store it."""
    return cache.put(tokens, build(family, tokens), namespace)


def take(
    cache: PromptCache, tokens: Sequence[int], family: str = "full", namespace: str = ""
) -> PromptLease | None:
    """Take a prompt and check the bytes of every layer."""
    lease = cache.take(tokens, namespace)
    if lease is not None:
        assert holds(lease, tokens[: lease.length], family)
    return lease


def taken(
    cache: PromptCache, tokens: Sequence[int], family: str = "full", namespace: str = ""
) -> int:
    """How many tokens of a prompt a take gets; the lease is given back."""
    lease = take(cache, tokens, family, namespace)
    if lease is None:
        return 0
    with lease:
        return lease.length


def turn(
    cache: PromptCache,
    tokens: Sequence[int],
    family: str,
    boundaries: Sequence[int] = (),
    namespace: str = "",
) -> int:
    """Serve a prompt as an engine does: take, prefill, put; returns the tokens it was spared."""
    lease = take(cache, tokens, family, namespace)
    spared = lease.length if lease is not None else 0
    points = cache.put_points(tokens, namespace, boundaries)
    caches = lease.caches if lease is not None else build(family, [])
    done = spared
    for point in (*points, len(tokens)):
        for stop in (*range(done + 5, point, 5), point):
            advance(caches, tokens[:stop], done)
            done = stop
        cache.put(tokens[:point], caches, namespace, lease)
    if lease is not None:
        lease.release()
    return spared


def holds(lease: PromptLease, tokens: Sequence[int], family: str) -> bool:
    """Whether a clone holds exactly what computing `tokens` gives."""
    found = contents(materialise(lease.caches))
    return all(same(a, b) for a, b in zip(found, contents(build(family, tokens)), strict=True))


def large(tokens: int, heads: int = 4, dim: int = 64, layers: int = 4) -> list[KVCache]:
    """Caches of some size: 2 KiB a token and layer in float32, filled with one number a layer."""
    caches = []
    for layer in range(layers):
        cache = KVCache()
        plane = mx.full((1, heads, tokens, dim), layer, mx.float32)
        cache.update_and_fetch(plane, plane + 1)
        caches.append(cache)
    mx.eval([cache.state for cache in caches])
    return caches


def sequence(start: int, length: int) -> list[int]:
    """Tokens that no other `start` begins with."""
    return [start, *np.arange(1, length).tolist()]
