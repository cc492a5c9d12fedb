"""The prompt cache: KV computed for one prompt serves every prompt that starts with its tokens."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache
from numpy.typing import NDArray

from ..affinity import ThreadGuard
from ..errors import CacheError, UnsupportedCacheKind
from ..trace.events import Divergence, MissReason
from .lease import PromptLease
from .plan import Plan
from .statistics import CacheStatistics, NamespaceStatistics

Tokens = Sequence[int] | NDArray[np.uint32]


class Stored(NamedTuple):
    """What a `put` did: `new_tokens` of the sequence and `new_bytes` of KV were not there before.

    `stored` is False for a sequence larger than the whole budget, or when the cache is off.
    """

    stored: bool
    new_tokens: int
    new_bytes: int


class _Entry(NamedTuple):
    tokens: NDArray[np.uint32]
    planes: list[tuple[mx.array, mx.array]]
    bytes: int


class PromptCache:
    """Entries of many namespaces under one budget of `max_bytes`. All calls from one thread."""

    def __init__(
        self,
        max_bytes: int,
        *,
        cold: Any = None,
        spill: Any = None,
        policy: Any = None,
        ledger: Any = None,
        trace: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_bytes = max_bytes
        self.hits = self.misses = self.demotions = 0
        self.on_put: Callable[[str, NDArray[np.uint32]], None] | None = None
        self._entries: dict[str, list[_Entry]] = {}
        self._leases = 0
        self._guard = ThreadGuard()

    @property
    def total_bytes(self) -> int:
        """Bytes of KV that the cache keeps alive."""
        return sum(entry.bytes for entries in self._entries.values() for entry in entries)

    def plan(self, tokens: Tokens, namespace: str = "") -> Plan:
        """Where the KV of `tokens` would come from. Changes nothing."""
        self._guard.check()
        wanted = np.asarray(tokens, dtype=np.uint32)
        donor, matched = self._deepest(wanted, namespace)
        length = min(matched, max(len(wanted) - 1, 0))
        reason: MissReason | None = None
        divergence = None
        if length < len(wanted) - 1:
            reason = "cold_start"
            if donor is not None and matched < len(donor.tokens):
                reason = "diverged"
                divergence = Divergence(matched, int(donor.tokens[matched]), int(wanted[matched]))
        return Plan(
            prompt_tokens=len(wanted), ram_tokens=length, reason=reason, divergence=divergence
        )

    def take(self, tokens: Tokens, namespace: str = "") -> PromptLease | None:
        """A clone of the deepest usable prefix of `tokens`, or None. Never consumes the donor."""
        wanted = np.asarray(tokens, dtype=np.uint32)
        length = self.plan(wanted, namespace).ram_tokens
        donor, _ = self._deepest(wanted, namespace)
        if not length or donor is None:
            self.misses += 1
            return None
        self.hits += 1
        self._leases += 1
        caches = [_clone(keys, values, length) for keys, values in donor.planes]
        return PromptLease(
            wanted[:length],
            caches,
            namespace=namespace,
            cold_tokens=0,
            on_release=self._released,
        )

    def put(
        self,
        tokens: Tokens,
        caches: Sequence[Any],
        namespace: str = "",
        lease: PromptLease | None = None,
    ) -> Stored:
        """Store the KV of `tokens`, held by `caches` at that offset; the caller keeps them.

        Raises `CacheError` if the caches do not hold exactly these tokens, `UnsupportedCacheKind`
        for a cache class without a codec; nothing is changed then.
        """
        self._guard.check()
        key = np.array(tokens, dtype=np.uint32)
        if self.max_bytes == 0:
            return Stored(False, 0, 0)
        entry = _seal(key, caches)
        _, matched = self._deepest(key, namespace)
        if matched == len(key):
            return Stored(True, 0, 0)
        entries = self._entries.setdefault(namespace, [])
        entries.append(entry)
        while self.total_bytes > self.max_bytes and entries:
            entries.pop(0)
        return Stored(True, len(key) - matched, entry.bytes)

    def clear(self, namespace: str | None = None) -> None:
        """Forget a namespace, or everything. Leases stay valid. Never spills."""
        for name in [namespace] if namespace is not None else list(self._entries):
            self._entries.pop(name, None)
        mx.clear_cache()

    def statistics(self) -> CacheStatistics:
        """Sizes and counts, per namespace and in total."""
        total = NamespaceStatistics(
            hits=self.hits, misses=self.misses, extent_bytes=self.total_bytes
        )
        return CacheStatistics(
            max_bytes=self.max_bytes, total=total, namespaces={}, leases=self._leases
        )

    def _released(self, lease: PromptLease) -> None:
        self._leases -= 1

    def _deepest(self, tokens: NDArray[np.uint32], namespace: str) -> tuple[_Entry | None, int]:
        best, length = None, 0
        for entry in self._entries.get(namespace, ()):
            shared = min(len(entry.tokens), len(tokens))
            unequal = np.flatnonzero(entry.tokens[:shared] != tokens[:shared])
            common = int(unequal[0]) if len(unequal) else shared
            if common > length:
                best, length = entry, common
        return best, length


def _seal(tokens: NDArray[np.uint32], caches: Sequence[Any]) -> _Entry:
    planes = []
    for layer, cache in enumerate(caches):
        if not isinstance(cache, KVCache):
            raise UnsupportedCacheKind(f"layer {layer} has a {type(cache).__name__}")
        if cache.offset != len(tokens):
            raise CacheError(
                f"layer {layer} holds {cache.offset} tokens; the key has {len(tokens)}"
            )
        keys, values = cache.keys_and_values()
        planes.append((mx.contiguous(mx.array(keys)), mx.contiguous(mx.array(values))))
    mx.eval(planes)
    return _Entry(tokens, planes, sum(k.nbytes + v.nbytes for k, v in planes))


def _clone(keys: mx.array, values: mx.array, length: int) -> KVCache:
    clone = KVCache()
    clone.keys = mx.array(keys[..., :length, :])
    clone.values = mx.array(values[..., :length, :])
    clone.offset = length
    return clone
