"""What `/v1/cache` takes and answers."""

from typing import Literal

from msgspec import Struct

from ...cache.listing import ListedEntry
from ...inspection import DEFAULT_LISTED, NamespaceView
from .prompts import PromptBody
from .visibility import reason_for


class CacheQuery(Struct, frozen=True, kw_only=True):
    """With a `namespace` its entries, so many from `offset` on; else all namespaces."""

    namespace: str | None = None
    offset: int = 0
    limit: int = DEFAULT_LISTED


class ClearQuery(Struct, frozen=True, kw_only=True):
    """Of which model; of all by default."""

    model: str | None = None


class PinBody(PromptBody, kw_only=True):
    """What is to be kept, and for how many seconds; 0 ends that."""

    seconds: float = 300.0


class FlushBody(Struct, kw_only=True):
    """How many seconds writing may take; no request goes on meanwhile."""

    seconds: float = 10.0


class Namespace(Struct, frozen=True, kw_only=True):
    """What memory has of a model for a tenant. Sizes in bytes; `tokens` are those of the index."""

    object: Literal["cache.namespace"] = "cache.namespace"
    namespace: str
    model: str
    tokens: int
    bytes: int
    pinned_bytes: int
    leased_bytes: int
    undurable_bytes: int
    hits: int
    misses: int
    hit_tokens: int
    missed_tokens: int
    evictions: int
    restores: int
    reasons: dict[str, int]


class NamespaceList(Struct, frozen=True, kw_only=True, tag_field="object", tag="cache.namespaces"):
    """All namespaces that the caller sees."""

    data: tuple[Namespace, ...]


class EntryList(Struct, frozen=True, kw_only=True, tag_field="object", tag="cache.entries"):
    """A page of the entries of a namespace, of which there are `total`."""

    namespace: str
    total: int
    has_more: bool
    next_offset: int
    data: tuple[ListedEntry, ...]


class DivergenceBody(Struct, frozen=True, kw_only=True):
    """Where a prompt leaves what is stored: the two tokens at `index`, and what they decode to."""

    index: int
    stored: int
    wanted: int
    stored_text: str
    wanted_text: str


class PlanAnswer(Struct, frozen=True, kw_only=True):
    """Where the KV of a prompt would come from: `prompt_tokens` is the sum of the three below."""

    object: Literal["cache.plan"] = "cache.plan"
    prompt_tokens: int
    ram_tokens: int
    cold_tokens: int
    prefill_tokens: int
    donor: str | None
    reason: str | None
    divergence: DivergenceBody | None
    boundaries: tuple[int, ...]


class PinAnswer(Struct, frozen=True, kw_only=True):
    """How many tokens of the prompt are pinned, or were."""

    object: Literal["cache.pin"] = "cache.pin"
    prompt_tokens: int
    tokens: int


class WarmAnswer(Struct, frozen=True, kw_only=True):
    """Where the prompt's tokens came from; now all of them are there."""

    object: Literal["cache.warmed"] = "cache.warmed"
    prompt_tokens: int
    ram_tokens: int
    cold_tokens: int
    prefilled_tokens: int


class FlushAnswer(Struct, frozen=True, kw_only=True):
    """What could not be written in time; 0 where all is on disk."""

    object: Literal["cache.flushed"] = "cache.flushed"
    writes_left: int
    bytes_left: int


class ClearAnswer(Struct, frozen=True, kw_only=True):
    """How many tokens memory forgot."""

    object: Literal["cache.cleared"] = "cache.cleared"
    tokens: int


def namespace_of(view: NamespaceView, seen: str | None) -> Namespace:
    """A namespace as the tenant `seen` may see it, None being all of them."""
    found = view.statistics
    reasons: dict[str, int] = {}
    for reason, count in found.reasons.items():
        name = reason_for(seen, reason) or reason
        reasons[name] = reasons.get(name, 0) + count
    return Namespace(
        namespace=view.namespace,
        model=view.model,
        tokens=found.tokens,
        bytes=found.total_bytes,
        pinned_bytes=found.pinned_bytes,
        leased_bytes=found.leased_bytes,
        undurable_bytes=found.undurable_bytes,
        hits=found.hits,
        misses=found.misses,
        hit_tokens=found.hit_tokens,
        missed_tokens=found.missed_tokens,
        evictions=found.evictions,
        restores=found.restores,
        reasons=reasons,
    )
