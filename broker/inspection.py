"""Looking into the prompt cache of an open broker, and steering it by hand."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from .checks import check_kind, check_range, check_sized, check_text, check_whole
from .texts import Texts

if TYPE_CHECKING:
    from .cache.cold import Flushed
    from .cache.listing import Listing
    from .cache.plan import Plan
    from .cache.statistics import NamespaceStatistics
    from .engine.loop import EngineLoop
    from .engine.thread import EngineThread

MAX_SECONDS = 3600.0
MAX_FLUSH_SECONDS = 600.0
MAX_LISTED = 1000
DEFAULT_LISTED = 100


class NamespaceView(Struct, frozen=True, kw_only=True):
    """A namespace of the prompt cache: its name, a digest; the model that it is of, as far as that
    is known; what it holds and what became of look-ups.
    """

    namespace: str
    model: str
    statistics: "NamespaceStatistics"


class CacheView:
    """The prompt cache as others may see and touch it. Safe in any task.

    KV is separated by `tenant`. A method that takes None for it means all tenants. `model` is by
    default the broker's first one.
    """

    def __init__(self, thread: "EngineThread[EngineLoop]", texts: Texts, first: str) -> None:
        self._thread = thread
        self._texts = texts
        self._first = first

    def namespace(self, model: str = "", tenant: str = "") -> str:
        """The namespace of a model for a tenant. Raises `ModelNotFound`."""
        from .models import namespace_digest

        check_text("tenant", tenant)
        return namespace_digest(self._texts.named(model or self._first).identity, tenant=tenant)

    def owned(self, tenant: str = "") -> dict[str, str]:
        """The namespaces that a tenant may have, by the models that are known now."""
        owned: dict[str, str] = {}
        for name in self._texts.names():
            owned.setdefault(self.namespace(name, tenant), name)
        return owned

    async def plan(self, tokens: Sequence[int], *, model: str = "", tenant: str = "") -> "Plan":
        """Where the KV of a prompt would come from now. Changes nothing.

        Raises `ModelNotFound`, and `InvalidRequest` for what are no tokens.
        """
        check_sized("tokens", tokens)
        name = self.namespace(model, tenant)
        return await self._thread.call(lambda engine: engine.cache.plan(tokens, name))

    async def pin(
        self, tokens: Sequence[int], seconds: float, *, model: str = "", tenant: str = ""
    ) -> int:
        """Keep in memory what it has of a prompt, for so many seconds; how many tokens that is.

        Raises `CacheError` where half of the cache would be pinned, else as `plan` does.
        """
        check_sized("tokens", tokens)
        check_range("seconds", seconds, 0.0, MAX_SECONDS, open_low=True)
        name = self.namespace(model, tenant)
        return await self._thread.call(lambda engine: engine.cache.pin(tokens, name, seconds))

    async def unpin(self, tokens: Sequence[int], *, model: str = "", tenant: str = "") -> int:
        """End a pin of exactly these tokens; how many they are, or 0 for none."""
        check_sized("tokens", tokens)
        name = self.namespace(model, tenant)
        return await self._thread.call(lambda engine: engine.cache.unpin(tokens, name))

    async def clear(self, *, model: str | None = None, tenant: str | None = "") -> int:
        """Forget what memory has for a tenant, of one model or of all; how many tokens that were.

        What runs goes on, and what the cold tier has stays there. Raises `ModelNotFound`.
        """
        check_kind("model", model or "", str, "text")
        wanted = self._wanted(model, tenant)

        def clear(engine: "EngineLoop") -> int:
            names = [each for each in engine.cache.namespaces if wanted is None or each in wanted]
            tokens = sum(engine.cache.tree(each).statistics().tokens for each in names)
            for name in names:
                engine.cache.clear(name)
            engine.scheduler.memory_changed()
            return tokens

        return await self._thread.call(clear)

    async def namespaces(self, tenant: str | None = "") -> tuple[NamespaceView, ...]:
        """The namespaces of a tenant that have been used, and what they hold."""
        wanted, named = self._wanted(None, tenant), self.owned(tenant or "")
        found = await self._thread.call(lambda engine: engine.cache.statistics().namespaces)
        return tuple(
            NamespaceView(namespace=name, model=named.get(name, ""), statistics=statistics)
            for name, statistics in found.items()
            if wanted is None or name in wanted
        )

    async def entries(
        self, namespace: str, *, offset: int = 0, limit: int = DEFAULT_LISTED
    ) -> "Listing":
        """What is stored in a namespace, the last used first: so many entries from `offset` on.

        Whose namespace it is the caller knows. Raises `InvalidRequest`.
        """
        check_text("namespace", namespace)
        check_whole("offset", offset, 0, "0 or more")
        check_whole("limit", limit, 0, "0 or more")
        check_range("limit", limit, 0, MAX_LISTED)
        return await self._thread.call(
            lambda engine: engine.cache.entries(namespace, offset, limit)
        )

    async def flush(self, seconds: float, *, tenant: str | None = "") -> "Flushed":
        """Write what only RAM has of a tenant to the cold tier; no request goes on meanwhile.

        Returns what is left to write after so many seconds.
        """
        check_range("seconds", seconds, 0.0, MAX_FLUSH_SECONDS)
        wanted = self._wanted(None, tenant)
        return await self._thread.call(lambda engine: engine.cache.flush(seconds, wanted))

    def _wanted(self, model: str | None, tenant: str | None) -> set[str] | None:
        """The namespaces that are meant; None for all."""
        if model is not None:
            return {self.namespace(model, tenant or "")}
        return None if tenant is None else set(self.owned(tenant))
