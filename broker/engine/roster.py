"""The models of an engine by name: loaded, unloaded, loaded again once somebody asks for them."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ..errors import InvalidRequest, ModelBusy, ModelNotFound
from ..request import ModelInfo
from .served import Served


class ModelSource(NamedTuple):
    """Where a model comes from: what `load` takes; of an adapter its folder and the name of the
    model that it is an adapter of.
    """

    spec: str
    dtype: str | None = None
    base: str = ""


class _Entry:
    """What the names of one model stand for."""

    def __init__(self, name: str, source: ModelSource, served: Served, now: float) -> None:
        self.names = [name]
        self.source = source
        self.served: Served | None = served
        self.context_length = served.model.context_length
        self.last_used = now


Open = Callable[[str, ModelSource, Served | None], Served]
"""Loads the model of a name, an adapter over a loaded one, and puts it into service."""


class Roster:
    """Names of models, each with what it stands for. The first one is meant where none is named."""

    def __init__(self, open_model: Open, clock: Callable[[], float]) -> None:
        self._open = open_model
        self._clock = clock
        self._entries: dict[str, _Entry] = {}

    def __iter__(self) -> Iterator[Served]:
        """The models that are loaded."""
        for entry in self._distinct():
            if entry.served is not None:
                yield entry.served

    def add(self, name: str, source: ModelSource, served: Served | None = None) -> ModelInfo:
        """Load a model, unless it is `served` already, under a new name.

        Raises `InvalidRequest` for a name that is taken, `ModelNotFound` for an unknown base, and
        what loading raises; nothing has changed then.
        """
        self._require_free(name)
        served = served or self._open(name, source, self._base(source))
        entry = _Entry(name, source, served, self._clock())
        self._entries[name] = entry
        return _info(entry)

    def alias(self, name: str, existing: str) -> ModelInfo:
        """Give a model one more name. Raises as `add` does."""
        self._require_free(name)
        entry = self._entry(existing)
        entry.names.append(name)
        self._entries[name] = entry
        return _info(entry)

    def serving(self, name: str = "") -> Served:
        """The model of that name, loaded if it is not. Raises `ModelNotFound`, and what loading
        raises.
        """
        entry = self._entry(name)
        entry.last_used = self._clock()
        return self._served(entry)

    def remove(self, name: str, busy: Iterable[Served]) -> list[str]:
        """Unload a model and forget all its names, and the adapters over it; returns the names.
        Raises `ModelNotFound` and, for models with open requests, `ModelBusy`.
        """
        entry = self._entry(name)
        if entry is next(self._distinct()):
            raise InvalidRequest(f"{name!r} is what requests without a model mean; it stays")
        leaving = [entry, *self._adapters_of(entry)]
        self._require_idle(leaving, busy)
        for each in reversed(leaving):
            self._let_go(each)
        names = [known for each in leaving for known in each.names]
        for known in names:
            del self._entries[known]
        return names

    def idle(self, busy: Iterable[Served]) -> list[tuple[str, float]]:
        """The models that nobody uses, the longest idle first, and for how many seconds."""
        now, in_use = self._clock(), set(busy)
        for entry in self._distinct():
            if entry.served in in_use:
                entry.last_used = now
        # While an adapter is in memory, so are the weights under it.
        unused = [
            entry
            for entry in self._distinct()
            if entry.served is not None
            and entry.served not in in_use
            and not any(each.served for each in self._adapters_of(entry))
        ]
        unused.sort(key=lambda entry: entry.last_used)
        return [(entry.names[0], now - entry.last_used) for entry in unused]

    def let_go(self, name: str) -> None:
        """Unload a model that `idle` named. The next request to it loads it again."""
        self._let_go(self._entry(name))

    def infos(self) -> tuple[ModelInfo, ...]:
        """All models, in the order in which they came."""
        return tuple(_info(entry) for entry in self._distinct())

    def named(self) -> dict[str, tuple[str, Served]]:
        """The models that are loaded, by their first names, and what each is an adapter of."""
        entries = [entry for entry in self._distinct() if entry.served is not None]
        return {e.names[0]: (e.source.base, e.served) for e in entries if e.served is not None}

    def close(self) -> None:
        """Unload everything."""
        for entry in reversed(list(self._distinct())):
            self._let_go(entry)

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name) if name else next(self._distinct(), None)
        if entry is None:
            known = ", ".join(self._entries)
            raise ModelNotFound(f"no model {name!r} is loaded; there are {known}")
        return entry

    def _served(self, entry: _Entry) -> Served:
        if entry.served is None:
            entry.served = self._open(entry.names[0], entry.source, self._base(entry.source))
        return entry.served

    def _base(self, source: ModelSource) -> Served | None:
        return self._served(self._entry(source.base)) if source.base else None

    def _distinct(self) -> Iterator[_Entry]:
        return iter({id(entry): entry for entry in self._entries.values()}.values())

    def _adapters_of(self, entry: _Entry) -> list[_Entry]:
        return [each for each in self._distinct() if each.source.base in entry.names]

    def _require_free(self, name: str) -> None:
        if not name or name in self._entries:
            problem = "a model's name is empty" if not name else f"the name {name!r} is taken"
            raise InvalidRequest(f"{problem}; taken are {', '.join(self._entries)}")

    def _require_idle(self, leaving: Iterable[_Entry], busy: Iterable[Served]) -> None:
        in_use = list(busy)
        for entry in leaving:
            if count := sum(served is entry.served for served in in_use):
                raise ModelBusy(f"{entry.names[0]!r} has {count:,} open requests")

    def _let_go(self, entry: _Entry) -> None:
        if entry.served is not None:
            served, entry.served = entry.served, None
            served.close()


def _info(entry: _Entry) -> ModelInfo:
    name, *aliases = entry.names
    return ModelInfo(
        name=name,
        aliases=tuple(aliases),
        base=entry.source.base,
        context_length=entry.context_length,
        loaded=entry.served is not None,
    )
