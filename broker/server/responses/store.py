"""What responses became: for those who ask for one again, or continue it.

A conversation is a chain: each response links to the one that it continued and holds only what is
its own. Any number of responses can continue the same one.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from http import HTTPStatus
from typing import NamedTuple, Self

from msgspec import Struct, field, to_builtins

from ..bodies import encode
from ..errors import ApiError, invalid
from ..settings import ServerSettings
from .live import LiveRuns
from .objects import Item, Response


class Stored(Struct, kw_only=True, eq=False):
    """A response that has ended, its own input, and the response that it continued.

    `agent` is who it was computed for. `was_continued` says that a later response went on as that
    agent, so that further ones are forks.
    """

    response: Response
    input: tuple[Item, ...]
    parent: "Stored | None" = None
    tenant: str = ""
    agent: str = ""
    swarm: str = ""
    was_continued: bool = False
    bytes: int = field(default=0)

    def __post_init__(self) -> None:
        self.bytes = len(encode((self.response, self.input)))

    @property
    def id(self) -> str:
        """The response's id."""
        return self.response.id

    def items(self) -> list[Item]:
        """Its own input and output."""
        return [*self.input, *(to_builtins(each) for each in self.response.output)]

    def chain(self) -> "list[Stored]":
        """The responses of its conversation, the first one first."""
        return list(_lineage(self))[::-1]


class ResponseStore:
    """Responses by id, at most `max_bytes` of them; the least recently used ones go first.

    What a response continued is kept, and counted, as long as the response is.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._entries: OrderedDict[str, Stored] = OrderedDict()
        self._hidden: set[str] = set()
        self._children: Counter[str] = Counter()
        self._items: dict[tuple[str, str], Stored] = {}

    def __len__(self) -> int:
        return len(self._entries) - len(self._hidden)

    def find(self, id: str, tenant: str) -> Stored | None:
        """A tenant's response, or None: it is unknown, has gone, or is another tenant's."""
        stored = self._entries.get(id)
        if stored is None or id in self._hidden or stored.tenant != tenant:
            return None
        self._refresh(stored)
        return stored

    def find_item(self, id: str, tenant: str) -> Item | None:
        """An input or output item of a tenant's response."""
        stored = self._items.get((tenant, id))
        if stored is None or stored.id in self._hidden:
            return None
        return next(item for item in stored.items() if item["id"] == id)

    def put(self, stored: Stored) -> None:
        """Keep a response, and what it continues with it; others go if there is too little room."""
        self._hidden.discard(stored.id)
        for each in _lineage(stored):
            if each.id in self._entries:
                break
            self._add(each)
            if each is not stored:
                self._hidden.add(each.id)
        self._refresh(stored)
        while self.bytes > self.max_bytes:
            self._remove(next(iter(self._entries.values())))

    def delete(self, id: str, tenant: str) -> bool:
        """Forget a tenant's response; those that continue it go on. Whether it was there."""
        stored = self.find(id, tenant)
        if stored is None:
            return False
        self._hidden.add(id)
        self._drop_unused(stored)
        return True

    def check_integrity(self) -> None:
        """Raise `AssertionError` if a total is not the sum of its parts, or a chain is torn."""
        assert self.bytes == sum(each.bytes for each in self._entries.values())
        assert self.bytes <= self.max_bytes
        parents = Counter(each.parent.id for each in self._entries.values() if each.parent)
        assert parents == +self._children
        assert parents.keys() <= self._entries.keys()
        assert all(self._children[id] for id in self._hidden)

    def _add(self, stored: Stored) -> None:
        self._entries[stored.id] = stored
        self.bytes += stored.bytes
        for key in _item_keys(stored):
            self._items[key] = stored
        if stored.parent is not None:
            self._children[stored.parent.id] += 1

    def _refresh(self, stored: Stored) -> None:
        """Make it the last to go, but for what it continues: so the first is continued by none."""
        for each in _lineage(stored):
            self._entries.move_to_end(each.id)

    def _drop_unused(self, stored: Stored) -> None:
        """Let go of hidden responses, from this one up, that nothing continues any more."""
        for each in _lineage(stored):
            if each.id not in self._hidden or self._children[each.id]:
                return
            self._remove_one(each)

    def _remove(self, stored: Stored) -> None:
        self._remove_one(stored)
        if stored.parent is not None:
            self._drop_unused(stored.parent)

    def _remove_one(self, stored: Stored) -> None:
        del self._entries[stored.id]
        self._hidden.discard(stored.id)
        self._children.pop(stored.id, None)
        self.bytes -= stored.bytes
        for key in _item_keys(stored):
            if self._items.get(key) is stored:
                del self._items[key]
        if stored.parent is not None:
            self._children[stored.parent.id] -= 1


class Stores(NamedTuple):
    """Where responses are looked up and kept: `own` is that of a connection, for `store: false`."""

    shared: ResponseStore
    live: LiveRuns
    own: ResponseStore | None = None

    @classmethod
    def of(cls, settings: ServerSettings) -> Self:
        """Those of a server; all its endpoints work with the same."""
        return cls(ResponseStore(settings.store_bytes), LiveRuns())

    def of_connection(self, max_bytes: int) -> "Stores":
        """These, and a store of one connection, which is gone with it."""
        return self._replace(own=ResponseStore(max_bytes))

    def find(self, id: str, tenant: str) -> Stored | None:
        """A tenant's response that has ended."""
        found = self.own.find(id, tenant) if self.own else None
        return found or self.shared.find(id, tenant)

    def find_item(self, id: str, tenant: str) -> Item | None:
        """An item of a tenant's responses."""
        found = self.own.find_item(id, tenant) if self.own else None
        return found or self.shared.find_item(id, tenant)

    def previous(self, id: str, tenant: str) -> Stored:
        """The response to be continued. Raises `ApiError`."""
        found = self.find(id, tenant)
        if found is None:
            raise invalid(
                f"Previous response with id '{id}' not found.",
                "previous_response_id",
                "previous_response_not_found",
            )
        return found

    def keep(self, stored: Stored) -> None:
        """Keep an ended response where it belongs, if anywhere."""
        store = self.shared if stored.response.store else self.own
        if store is not None:
            store.put(stored)


def not_found(id: str) -> ApiError:
    """The error of asking for a response that is not there."""
    return ApiError(HTTPStatus.NOT_FOUND, f"Response with id '{id}' not found.")


def _item_keys(stored: Stored) -> Iterator[tuple[str, str]]:
    for item in stored.input:
        yield stored.tenant, item["id"]
    for output in stored.response.output:
        yield stored.tenant, output.id


def _lineage(stored: Stored | None) -> Iterator[Stored]:
    while stored is not None:
        yield stored
        stored = stored.parent
