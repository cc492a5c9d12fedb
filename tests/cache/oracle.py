"""The definition of right for the prompt cache: a linear scan over deep copies of everything put.

No tree, no sharing, no eviction of its own: `retain` tells it what the cache under test still
holds. It has the cache's interface, so that it can also stand in for it where speed and memory do
not matter.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_swarm.broker.cache.kinds import materialise
from mlx_swarm.broker.cache.lease import PromptLease
from mlx_swarm.broker.cache.plan import Plan
from mlx_swarm.broker.cache.prompt_cache import Stored
from tests.cache.rows import Array, Content, Rows, State, contents


class Resident(NamedTuple):
    """What is left of a path: its tokens, and the lengths at which it has a checkpoint."""

    tokens: Array
    checkpoints: frozenset[int]


class Lost(NamedTuple):
    """Tokens, and states at the end of entries, summed over entries."""

    tokens: int
    states: int


class _Entry:
    """One `put`: its tokens, deep copies of every layer, how many tokens are held. `known` are
    those whose log-probability came along.
    """

    def __init__(
        self, tokens: Array, caches: Sequence[Any], layers: list[Content], known: Array
    ) -> None:
        self.tokens = tokens
        self.known = known
        self.caches = caches
        self.layers = layers
        self.held = len(tokens)
        self.has_state = True


class LinearPromptCache:
    """Scans every entry at every call."""

    def __init__(self, max_bytes: int = 1 << 62) -> None:
        self.max_bytes = max_bytes
        self.hits = self.misses = 0
        self.on_put: Callable[[str, Array], None] | None = None
        self._entries: dict[str, list[_Entry]] = {}

    def plan(self, tokens: Sequence[int], namespace: str = "") -> Plan:
        """The deepest usable length over all entries."""
        length = self.usable(tokens, namespace)
        return Plan(prompt_tokens=len(tokens), ram_tokens=length)

    def take(self, tokens: Sequence[int], namespace: str = "") -> PromptLease | None:
        """Stock mlx-lm caches, deep copies, at the deepest usable length."""
        length = self.usable(tokens, namespace)
        self.hits, self.misses = self.hits + (length > 0), self.misses + (length == 0)
        if not length:
            return None
        prompt = _array(tokens)
        layers = iter(self.layers(prompt, length, namespace))
        template = copy.deepcopy(self._matching(prompt, namespace)[0][0].caches)
        for cache in template:
            _fill(cache, layers, length)
        return PromptLease(
            prompt[:length],
            lambda: list(template),
            namespace=namespace,
            plan=Plan(prompt_tokens=len(tokens), ram_tokens=length),
            on_release=lambda lease: None,
        )

    def put(
        self,
        tokens: Sequence[int],
        caches: Sequence[Any],
        namespace: str = "",
        lease: PromptLease | None = None,
        logprobs: Array | None = None,
    ) -> Stored:
        """Keep deep copies of everything the caches hold."""
        before = self._longest(_array(tokens), namespace)
        known = np.zeros(len(tokens), bool) if logprobs is None else ~np.isnan(logprobs)
        entry = _Entry(_array(tokens), materialise(caches), contents(caches), known)
        self._entries.setdefault(namespace, []).append(entry)
        if self.on_put is not None:
            self.on_put(namespace, entry.tokens)
        return Stored(len(tokens) - before, 0)

    def peek_prefix_len(self, tokens: Sequence[int], namespace: str = "") -> int:
        """Tokens of the prompt that need not be computed."""
        return self.usable(tokens, namespace)

    def find_exact(self, tokens: Sequence[int], namespace: str = "") -> bool:
        """Whether all of exactly these tokens is held."""
        return self._deepest(_array(tokens), len(tokens), namespace) == len(tokens)

    def clear(self, namespace: str | None = None) -> None:
        """Forget a namespace, or everything."""
        for name in [namespace] if namespace is not None else list(self._entries):
            self._entries.pop(name, None)

    def retain(self, namespace: str, resident: Iterable[Resident]) -> Lost:
        """Forget all that is in none of the resident paths; returns what was lost by that."""
        paths, tokens, states = list(resident), 0, 0
        for entry in self._entries.get(namespace, []):
            shared = [(_common(entry.tokens, path.tokens), path) for path in paths]
            held = min(entry.held, max((length for length, _ in shared), default=0))
            size = len(entry.tokens)
            state = any(n == size and size in path.checkpoints for n, path in shared)
            tokens += entry.held - held
            states += entry.has_state and not state
            entry.held, entry.has_state = held, entry.has_state and state
        kept = [entry for entry in self._entries.get(namespace, []) if entry.held]
        self._entries[namespace] = kept
        return Lost(tokens, states)

    def usable(
        self, tokens: Sequence[int], namespace: str = "", alternatives: int | None = None
    ) -> int:
        """The greatest length below len(tokens) at which every layer is known; with `alternatives`,
        at which no log-probability is lacking, that of the token after it included.
        """
        limit = len(tokens) - 1
        if alternatives is not None:
            unknown = np.flatnonzero(~self.known_logprobs(tokens, namespace))
            first = int(unknown[0]) if len(unknown) else len(tokens)
            limit = 0 if alternatives else min(limit, max(first - 1, 0))
        return self._deepest(_array(tokens), limit, namespace)

    def known_logprobs(self, tokens: Sequence[int], namespace: str = "") -> Array:
        """Of which tokens the log-probability came with an entry that still has the token."""
        known = np.zeros(len(tokens), bool)
        for entry, shared in self._matching(_array(tokens), namespace):
            known[:shared] |= entry.known[:shared]
        return known

    def layers(self, prompt: Array, length: int, namespace: str) -> list[Content]:
        """What every layer holds at `length`, from whichever entries have it."""
        matching = self._matching(prompt[:length], namespace)
        first = matching[0][0]
        return [self._layer(matching, index, length) for index in range(len(first.layers))]

    def _layer(self, matching: list[tuple[_Entry, int]], index: int, length: int) -> Content:
        sample = matching[0][0].layers[index]
        if isinstance(sample, State):
            return next(e.layers[index] for e, n in matching if len(e.tokens) == length == n)
        known: dict[int, tuple[Array, ...]] = {}
        for entry, shared in matching:
            rows = entry.layers[index]
            assert isinstance(rows, Rows)
            for at, position in enumerate(rows.positions[rows.positions < shared]):
                known[int(position)] = tuple(plane[:, at] for plane in rows.planes)
        positions = sorted(known)
        columns = zip(*(known[p] for p in positions), strict=True)
        return Rows(np.array(positions), tuple(np.stack(column, axis=1) for column in columns))

    def _deepest(self, prompt: Array, limit: int, namespace: str) -> int:
        matching = self._matching(prompt, namespace)
        if not matching:
            return 0
        deepest = min(limit, max(shared for _, shared in matching))
        valid = np.ones(deepest + 1, dtype=bool)
        for index, cache in enumerate(_flat(matching[0][0].caches)):
            valid &= _valid_lengths(matching, index, cache, deepest)
        return int(np.flatnonzero(valid)[-1])

    def _longest(self, prompt: Array, namespace: str) -> int:
        return max((shared for _, shared in self._matching(prompt, namespace)), default=0)

    def _matching(self, prompt: Array, namespace: str) -> list[tuple[_Entry, int]]:
        found = []
        for entry in self._entries.get(namespace, ()):
            shared = min(_common(entry.tokens, prompt), entry.held)
            if shared:
                found.append((entry, shared))
        return found


def _valid_lengths(
    matching: list[tuple[_Entry, int]], index: int, cache: Any, deepest: int
) -> Array:
    """Which of the lengths 0..deepest one layer can serve. Length 0 needs nothing."""
    valid = np.zeros(deepest + 1, dtype=bool)
    valid[0] = True
    if isinstance(cache, ArraysCache):
        for entry, shared in matching:
            if entry.has_state and shared == len(entry.tokens) <= deepest:
                valid[shared] = True
        return valid
    known = np.zeros(deepest, dtype=bool)
    for entry, shared in matching:
        rows = entry.layers[index]
        assert isinstance(rows, Rows)
        known[rows.positions[rows.positions < min(shared, deepest)]] = True
    missing = np.concatenate([[0], np.cumsum(~known)])
    keep, span = _needs(cache, deepest)
    lengths = np.arange(deepest + 1)
    kept = np.minimum(keep, lengths)
    starts = np.maximum(lengths - span, kept)
    result: Array = (missing == missing[starts]) & (missing[kept] == 0)
    return result


def _needs(cache: Any, length: int) -> tuple[int, int]:
    """How many of the first and of the last tokens before `length` a layer attends to."""
    if isinstance(cache, RotatingKVCache):
        return cache.keep, cache.max_size - cache.keep
    return 0, cache.chunk_size if isinstance(cache, ChunkedKVCache) else length


def _fill(cache: Any, layers: Any, length: int) -> None:
    """Make a deep copy of some entry's cache object hold what the next of `layers` says."""
    if isinstance(cache, CacheList):
        for nested in cache.caches:
            _fill(nested, layers, length)
        return
    layer = next(layers)
    if isinstance(layer, State):
        cache.cache = [None if slot is None else mx.array(slot) for slot in layer.slots]
        return
    keep, span = _needs(cache, length)
    needed = (layer.positions < keep) | (layer.positions >= length - span)
    planes = [mx.array(plane[:, needed])[None] for plane in layer.planes]
    half = len(planes) // 2
    if isinstance(cache, QuantizedKVCache):
        cache.keys, cache.values = tuple(planes[:half]), tuple(planes[half:])
    else:
        cache.keys, cache.values = planes
    cache.offset = length
    if isinstance(cache, RotatingKVCache):
        cache._idx = cache.keys.shape[2]
    if isinstance(cache, ChunkedKVCache):
        cache.start_position = length - cache.keys.shape[2]


def _flat(caches: Sequence[Any]) -> list[Any]:
    flat: list[Any] = []
    for cache in caches:
        flat.extend(_flat(cache.caches) if isinstance(cache, CacheList) else [cache])
    return flat


def _common(first: Array, second: Array) -> int:
    shared = min(len(first), len(second))
    unequal = np.flatnonzero(first[:shared] != second[:shared])
    return int(unequal[0]) if len(unequal) else shared


def _array(tokens: Sequence[int]) -> Array:
    return np.array(tokens, dtype=np.uint32)
