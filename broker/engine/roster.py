"""The models of an engine by name: loaded, unloaded, loaded again once somebody asks for them."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import mlx.core as mx

from ..cache.ledger import Ledger, format_bytes
from ..cache.prompt_cache import PromptCache
from ..errors import InvalidRequest, ModelBusy, ModelNotFound, OutOfMemory
from ..models import LoadedModel, load, load_adapter
from ..request import ModelInfo, RequestId
from ..trace import events
from ..trace.recorder import Recorder
from .lane import Lane
from .row import Row
from .served import Served
from .settings import ModelStatistics

LOOKS = 4
"""For models without use it is looked so many times in the time after which they are unloaded."""


class ModelSource(NamedTuple):
    """Where a model comes from: what `load` takes; of an adapter its folder and the name of the
    model that it is an adapter of.
    """

    spec: str
    dtype: str | None = None
    base: str = ""


class _Entry:
    """What the names of one model stand for; the first is its own."""

    def __init__(self, name: str, source: ModelSource, served: Served, now: float) -> None:
        self.names = [name]
        self.source = source
        self.served: Served | None = served
        self.context_length = served.model.context_length
        self.last_used = now


class Drafts(Mapping[str, LoadedModel]):
    """The models that may propose tokens, by name: all of a roster, each loaded when asked for."""

    def __init__(self, roster: "Callable[[], Roster]") -> None:
        self._roster = roster

    def __getitem__(self, name: str) -> LoadedModel:
        try:
            return self._roster().serving(name).model
        except ModelNotFound:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._roster().names)

    def __len__(self) -> int:
        return len(self._roster().names)


Serve = Callable[[LoadedModel, LoadedModel | None, str], Served]
"""Puts a loaded model into service under a name; of an adapter with the model under it."""


class Roster:
    """Models under names. The first one is meant where none is named, and always keeps its name.

    `rows` are the open requests. What is loaded has to fit the `ledger`: who has no use for their
    memory then gives it back, the `cache` before models that nobody uses. These are unloaded as
    well once that has lasted `idle_unload` seconds.
    """

    def __init__(
        self,
        first: Served,
        source: ModelSource,
        serve: Serve,
        rows: Mapping[RequestId, Row],
        cache: PromptCache,
        ledger: Ledger,
        recorder: Recorder,
        idle_unload: float | None = None,
    ) -> None:
        self._serve = serve
        self._rows = rows
        self._cache = cache
        self._ledger = ledger
        self._recorder = recorder
        self._idle_unload = idle_unload
        self._first = _Entry(first.model.name, source, first, recorder.now())
        self._entries = {first.model.name: self._first}
        self.next_look = math.inf if idle_unload is None else recorder.now()
        """When, on the recorder's clock, to call `unload_idle`."""

    def loaded(self) -> Iterator[Served]:
        """The models that are in memory."""
        return (entry.served for entry in self._distinct() if entry.served is not None)

    @property
    def lanes(self) -> Iterator[Lane]:
        """The lanes of all models that are loaded."""
        for served in self.loaded():
            yield from served.lanes

    @property
    def names(self) -> tuple[str, ...]:
        """All names, aliases included."""
        return tuple(self._entries)

    def add(self, name: str, source: ModelSource) -> tuple[ModelInfo, LoadedModel]:
        """Load a model under a new name. Raises `InvalidRequest` for one that is taken,
        `ModelNotFound` for an unknown base, `OutOfMemory`, and what loading raises; nothing has
        changed then.
        """
        self._require_free(name)
        if source.base:
            self._entry(source.base)
        served = self._open(name, source)
        self._entries[name] = entry = _Entry(name, source, served, self._recorder.now())
        return _info(entry), served.model

    def alias(self, name: str, existing: str) -> ModelInfo:
        """Give a model one more name. Raises as `add` does."""
        self._require_free(name)
        entry = self._entry(existing)
        entry.names.append(name)
        self._entries[name] = entry
        return _info(entry)

    def serving(self, name: str = "") -> Served:
        """The model of that name, loaded if it is not. Raises `ModelNotFound`, `OutOfMemory`, and
        what loading raises.
        """
        entry = self._entry(name)
        entry.last_used = self._recorder.now()
        if entry.served is None:
            entry.served = self._open(entry.names[0], entry.source)
        return entry.served

    def remove(self, name: str) -> list[str]:
        """Unload a model and the adapters over it, and forget their names, which it returns.

        Raises `ModelNotFound`, `InvalidRequest` for the first model, and `ModelBusy` for models
        with open requests.
        """
        entry = self._entry(name)
        if entry is self._first:
            raise InvalidRequest(f"{name!r} is what requests without a model mean; it stays")
        leaving = [entry, *self._adapters_of(entry)]
        for each in leaving:
            if count := self._requests(each):
                requests = "request" if count == 1 else "requests"
                raise ModelBusy(f"{each.names[0]!r} has {count:,} open {requests}")
        for each in reversed(leaving):
            self._let_go(each, "asked")
        names = [known for each in leaving for known in each.names]
        for known in names:
            del self._entries[known]
        return names

    def unload_idle(self) -> bool:
        """Let go of the weights of models that nobody has used for too long, if it is time; whether
        there were any.
        """
        now = self._recorder.now()
        if self._idle_unload is None or now < self.next_look:
            return False
        self.next_look = now + self._idle_unload / LOOKS
        idle = [each for each in self._unused() if now - each.last_used >= self._idle_unload]
        for entry in idle:
            self._let_go(entry, "idle")
        return bool(idle)

    def infos(self) -> tuple[ModelInfo, ...]:
        """All models, in the order in which they came."""
        return tuple(_info(entry) for entry in self._distinct())

    def statistics(self) -> dict[str, ModelStatistics]:
        """The models that are loaded, by their first names."""
        return {
            entry.names[0]: ModelStatistics(
                base=entry.source.base,
                weights=entry.served.weights,
                requests=self._requests(entry),
                lane=entry.served.batch.statistics(),
                serial=entry.served.serial.statistics(),
            )
            for entry in self._distinct()
            if entry.served is not None
        }

    def close(self) -> None:
        """Unload everything."""
        for served in reversed(list(self.loaded())):
            served.close()

    def _open(self, name: str, source: ModelSource) -> Served:
        began = self._recorder.now()
        base = self.serving(source.base) if source.base else None
        if base is None:
            served = self._serve(load(source.spec, dtype=source.dtype), None, name)
        else:
            served = self._serve(load_adapter(base.model, source.spec, name=name), base.model, name)
        try:
            self._make_room_for(served, name, base)
        except BaseException:
            served.close()
            raise
        self._recorder.note(
            events.ModelLoaded,
            model=name,
            base=source.base,
            weights=served.weights,
            seconds=self._recorder.now() - began,
        )
        return served

    def _make_room_for(self, served: Served, name: str, base: Served | None) -> None:
        """Have others give back what a model takes already, if they have enough."""
        ledger = self._ledger
        unused = [each for each in self._unused() if each.served and each.served is not base]
        droppable = sum(each.served.weights for each in unused if each.served)
        if ledger.total - droppable - self._cache.total_bytes <= ledger.limit:
            if ledger.total > ledger.limit:
                self._cache.give_way(1)
            for entry in unused:
                if ledger.total > ledger.limit:
                    self._let_go(entry, "memory")
        if ledger.total > ledger.limit:
            others = format_bytes(ledger.total - served.weights)
            raise OutOfMemory(
                f"the weights of {name!r} take {format_bytes(served.weights)}; the limit is "
                f"{format_bytes(ledger.limit)}, of which {others} are in use"
            )

    def _unused(self) -> list[_Entry]:
        """Models in memory that nobody uses, the longest unused first. A model under an adapter
        that is in memory is in use.
        """
        entries = [entry for entry in self._distinct() if entry.served is not None]
        for entry in entries:
            if self._requests(entry):
                entry.last_used = self._recorder.now()
        unused = [
            entry
            for entry in entries
            if not self._requests(entry)
            and not any(adapter.served for adapter in self._adapters_of(entry))
        ]
        return sorted(unused, key=lambda entry: entry.last_used)

    def _requests(self, entry: _Entry) -> int:
        """How many open requests need a model, to answer or to propose."""
        lanes = entry.served.lanes if entry.served is not None else ()
        return sum(
            row.request.draft in entry.names or any(row.lane is lane for lane in lanes)
            for row in self._rows.values()
        )

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name) if name else self._first
        if entry is None:
            raise ModelNotFound(f"no model {name!r} is loaded; there are {self._names()}")
        return entry

    def _distinct(self) -> list[_Entry]:
        return list({id(entry): entry for entry in self._entries.values()}.values())

    def _adapters_of(self, entry: _Entry) -> list[_Entry]:
        return [each for each in self._distinct() if each.source.base in entry.names]

    def _require_free(self, name: str) -> None:
        if not name or name in self._entries:
            problem = "a model's name is empty" if not name else f"the name {name!r} is taken"
            raise InvalidRequest(f"{problem}; there are {self._names()}")

    def _names(self) -> str:
        return ", ".join(map(repr, self._entries))

    def _let_go(self, entry: _Entry, reason: str) -> None:
        if entry.served is not None:
            served, entry.served = entry.served, None
            served.close()
            served.model.release()
            mx.clear_cache()
            self._recorder.note(events.ModelUnloaded, model=entry.names[0], reason=reason)


def _info(entry: _Entry) -> ModelInfo:
    name, *aliases = entry.names
    return ModelInfo(
        name=name,
        aliases=tuple(aliases),
        base=entry.source.base,
        context_length=entry.context_length,
        loaded=entry.served is not None,
    )
