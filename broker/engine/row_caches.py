"""How rows get their KV out of the prompt cache and into it, the same for every lane."""

import logging
from collections.abc import Sequence
from typing import Any, Protocol

from mlx_lm.models.cache import KVCache

from ..affinity import ThreadGuard
from ..cache.intake import Row as StoredRow
from ..cache.lease import PromptLease
from ..cache.prefix_hash import Tokens
from ..cache.prompt_cache import PromptCache
from ..cache.restores import Restoration
from ..errors import SwarmError
from ..models import LoadedModel
from .prompt_logprobs import PromptLogprobs
from .row import Row
from .self_test import SelfTest

_log = logging.getLogger(__name__)


class Holder(Protocol):
    """Whoever holds KV of one model: caches, and the lease that they read. `id` is for logs."""

    lease: PromptLease | None
    prompt_logprobs: PromptLogprobs | None
    caches: list[Any]

    @property
    def id(self) -> str: ...
    @property
    def namespace(self) -> str: ...
    @property
    def reads_cache(self) -> bool: ...


class RowCaches:
    """Fills rows from the prompt cache, and puts what they computed with one model."""

    def __init__(self, model: LoadedModel, cache: PromptCache, self_test: SelfTest) -> None:
        self._guard = ThreadGuard()
        self._model = model
        self._cache = cache
        self.self_test = self_test
        self.exact_stops = not all(type(cache) is KVCache for cache in model.make_caches())
        """Whether what is stored may serve one length only: none then stands for one nearby."""
        self.namespaces: set[str] = set()
        """Those of the rows so far."""

    def lease(self, row: Row, restoration: Restoration | None = None) -> None:
        """Lease what the prompt cache has for a row; its position is where that ends."""
        self._guard.check()
        self.namespaces.add(row.namespace)
        if not row.reads_cache:
            row.take(None)
            return
        asked, lacking = (row.sequence, row.namespace), row.lacking_alternatives
        lease = self._cache.lease(*asked, restoration, lacking)
        row.plan = lease.plan if lease else self._cache.plan(*asked, lacking)
        row.take(lease)
        if row.prompt_logprobs is not None and lease is not None and lease.logprobs is not None:
            row.prompt_logprobs.know(lease.logprobs[: len(row.prompt)])

    def lease_resident(self, holder: Holder, prompt: Tokens) -> int:
        """Lease what RAM has of a prompt; how many tokens that is."""
        self._guard.check()
        if holder.reads_cache:
            holder.lease = self._cache.lease(prompt, holder.namespace)
        return holder.lease.length if holder.lease is not None else 0

    def fill(self, holder: Holder) -> None:
        """Give a holder its caches: a clone of what it has leased, or empty ones."""
        if holder.lease is not None:
            holder.caches = self.self_test.usable(holder.lease.caches)
        else:
            holder.caches = self._model.make_caches()

    def put(
        self, holder: Holder, tokens: Sequence[int] | Tokens, held: Sequence[Any] | StoredRow
    ) -> bool:
        """Put, where a refusal costs nobody anything but the next hit; whether it is stored."""
        self._guard.check()
        if not holder.reads_cache:
            return False
        asked = holder.prompt_logprobs
        try:
            logprobs = asked.own(len(tokens)) if asked is not None else None
            return self._cache.put(tokens, held, holder.namespace, holder.lease, logprobs).stored
        except SwarmError:
            return False
        except (MemoryError, RuntimeError):  # MLX raises these where it finds no memory
            _log.exception("what request %s computed could not be stored", holder.id)
            return False

    def let_go(self, holder: Holder) -> None:
        """Take its caches and its lease. Doing so again is harmless."""
        holder.caches = []
        if holder.lease is not None:
            holder.lease.release()
            holder.lease = None
