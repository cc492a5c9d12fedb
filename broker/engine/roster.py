"""The models of an engine by name: loaded, unloaded, loaded again once somebody asks for them."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import mlx.core as mx

from ..cache.ledger import Ledger, format_bytes
from ..cache.prompt_cache import PromptCache
from ..errors import InvalidRequest, ModelBusy, ModelNotFound, ModelUnreadable, OutOfMemory
from ..models import LoadedModel, ModelIdentity, load, load_adapter
from ..request import ModelInfo, RequestId
from ..trace import events
from ..trace.recorder import Recorder
from .lane import Lane
from .row import Row
from .served import Served
from .settings import ModelStatistics

LOOKS = 4
"""For models without use it is looked so many times in the time after which they are unloaded."""

LOOK_SECONDS = 0.05
"""It is not looked more often than this: a look wakes a thread that rests."""

WRITE_SECONDS = 5.0
"""What the cache has to write before it can give way to a model gets so long."""


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
        self.identity = served.model.identity
        self.context_length = served.model.context_length
        self.last_used = now
        self.holders = 0
        """How many are about to make a request to it."""


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
        """The model of that name, loaded if it is not. Raises `ModelNotFound`, `OutOfMemory`, what
        loading raises, and `ModelUnreadable` where something else has come into its place.
        """
        entry = self._entry(name)
        entry.last_used = self._recorder.now()
        if entry.served is None:
            entry.served = self._open(entry.names[0], entry.source, entry.identity)
        return entry.served

    @contextmanager
    def held(self, name: str = "") -> Iterator[Served]:
        """`serving`, which stays in memory meanwhile, whatever else is loaded."""
        entry = self._entry(name)
        entry.holders += 1
        try:
            yield self.serving(name)
        finally:
            entry.holders -= 1

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
        self.next_look = now + max(self._idle_unload / LOOKS, LOOK_SECONDS)
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

    def _open(
        self, name: str, source: ModelSource, identity: ModelIdentity | None = None
    ) -> Served:
        """Load a model and put it into service, but for one that is not what it was."""
        began = self._recorder.now()
        if source.base:
            with self.held(source.base) as base:
                adapted = load_adapter(base.model, source.spec, name=name)
                served = self._serve_within(adapted, base.model, name, identity)
        else:
            model = load(source.spec, dtype=source.dtype)
            served = self._serve_within(model, None, name, identity)
        self._recorder.note(
            events.ModelLoaded,
            model=name,
            base=source.base,
            weights=served.weights,
            seconds=self._recorder.now() - began,
        )
        return served

    def _serve_within(
        self,
        model: LoadedModel,
        base: LoadedModel | None,
        name: str,
        identity: ModelIdentity | None,
    ) -> Served:
        """Put a loaded model into service, within the limit."""
        _require_same(name, model.identity, identity)
        served = self._serve(model, base, name)
        try:
            self._make_room_for(served, name)
        except BaseException:
            served.close()
            raise
        return served

    def _make_room_for(self, served: Served, name: str) -> None:
        """Have others give back what a model takes already, if they have enough."""
        unused = self._unused()
        droppable = sum(each.served.weights for each in unused if each.served)
        if self._excess - droppable <= self._cache.spare_bytes:
            self._shrink_cache()
            for entry in unused:
                if self._excess > 0:
                    self._let_go(entry, "memory")
        if self._excess > 0:
            others = format_bytes(self._ledger.total - served.weights)
            raise OutOfMemory(
                f"the weights of {name!r} take {format_bytes(served.weights)}; the limit is "
                f"{format_bytes(self._ledger.limit)}, of which {others} are in use"
            )

    def _shrink_cache(self) -> None:
        """Have the cache give back what is beyond the limit. With a cold tier that is written
        first; nothing else goes on in these seconds, nor while a model is loaded.
        """
        if self._excess > 0:
            self._cache.shrink(self._excess)
        if self._excess > 0 and self._cache.is_writing:
            self._cache.flush(WRITE_SECONDS)
            self._cache.shrink(self._excess)

    @property
    def _excess(self) -> int:
        """Bytes beyond the limit."""
        return self._ledger.total - self._ledger.limit

    def _unused(self) -> list[_Entry]:
        """Models in memory that nobody uses, the longest unused first. Who uses an adapter uses the
        model under it, which therefore comes after it.
        """
        now = self._recorder.now()
        loaded = [entry for entry in self._distinct() if entry.served is not None]
        used = [entry for entry in loaded if entry.holders or self._requests(entry)]
        unused = []
        for entry in loaded:
            users = [entry, *(each for each in self._adapters_of(entry) if each.served)]
            if any(each in used for each in users):
                entry.last_used = now
            else:
                entry.last_used = max(each.last_used for each in users)
                unused.append(entry)
        return sorted(unused, key=lambda entry: (entry.last_used, not entry.source.base))

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
            try:
                served.close()
            finally:
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


def _require_same(name: str, found: ModelIdentity, expected: ModelIdentity | None) -> None:
    """Raise `ModelUnreadable` unless a model that comes back is the one that left: tokens that were
    made with it, and what is known of it, would not fit another one.
    """
    if expected is None or found == expected:
        return
    fields = found.__struct_fields__
    changed = [each for each in fields if getattr(found, each) != getattr(expected, each)]
    raise ModelUnreadable(
        f"{name!r} was unloaded while idle, and what is in its place by now differs in "
        f"{' and '.join(changed)}; load that under another name"
    )
