"""The prompt cache in numbers: frozen, and additive over namespaces."""

from typing import Self

from msgspec import Struct, field


class NamespaceStatistics(Struct, frozen=True, kw_only=True):
    """One namespace, or the sum of all. Sizes in bytes.

    `total_bytes` = extents + checkpoints: distinct bytes, however many entries run through them.
    `slack_bytes` of them belong to rows that no entry needs any more. `leased_bytes`,
    `pinned_bytes` and `undurable_bytes` (not covered by the cold tier yet) are those that could not
    be evicted now, with all that lies above them; one byte may count in several. `restores_refused`
    were worth it, but there was no memory for them.
    """

    nodes: int = 0
    tokens: int = 0
    index_bytes: int = 0
    extent_bytes: int = 0
    checkpoint_bytes: int = 0
    checkpoints: int = 0
    slack_bytes: int = 0
    leased_bytes: int = 0
    pinned_bytes: int = 0
    undurable_bytes: int = 0
    hits: int = 0
    misses: int = 0
    hit_tokens: int = 0
    missed_tokens: int = 0
    puts: int = 0
    duplicates: int = 0
    rejected: int = 0
    oversize: int = 0
    unstored: int = 0
    evictions: int = 0
    checkpoints_dropped: int = 0
    demotions: int = 0
    restores: int = 0
    restore_failures: int = 0
    restores_refused: int = 0
    spills: int = 0
    spill_failures: int = 0
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """All KV bytes that the cache keeps alive."""
        return self.extent_bytes + self.checkpoint_bytes

    def __add__(self, other: Self) -> Self:
        sums = {
            name: getattr(self, name) + getattr(other, name)
            for name in self.__struct_fields__
            if name != "reasons"
        }
        names = self.reasons.keys() | other.reasons.keys()
        reasons = {n: self.reasons.get(n, 0) + other.reasons.get(n, 0) for n in sorted(names)}
        return type(self)(**sums, reasons=reasons)


class ColdStatistics(Struct, frozen=True, kw_only=True):
    """A cold store. Sizes in bytes, `restore_seconds` includes waiting for other restores.

    `orphans` are files whose parent is gone, `foreign` those of another make or a newer format,
    which are left alone; `quarantined` were corrupt, `unreadable` could not be read.
    """

    files: int = 0
    bytes: int = 0
    max_bytes: int = 0
    pending_writes: int = 0
    pending_bytes: int = 0
    hits: int = 0
    restores: int = 0
    restored_bytes: int = 0
    restore_seconds: float = 0.0
    writes: int = 0
    written_bytes: int = 0
    write_failures: int = 0
    quarantined: int = 0
    unreadable: int = 0
    foreign: int = 0
    orphans: int = 0
    evicted: int = 0
    is_read_only: bool = False


class CacheStatistics(Struct, frozen=True, kw_only=True):
    """The whole cache: the sum, and each namespace."""

    max_bytes: int
    total: NamespaceStatistics
    namespaces: dict[str, NamespaceStatistics]
    leases: int
    departing_bytes: int = 0
    cold: ColdStatistics | None = None
