"""Which files there are, how they hang together, and which goes first. No I/O.

A file hangs on another at any token of it: a walk compares the tokens of a prompt with those of
every file it passes, so no hash decides what matches. The caller locks.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import NamedTuple

from ..layout import Layout
from ..prefix_hash import Tokens
from .record import Chain, Link, Record

NO_TOKEN = -1
"""Stands for the first token of a file that holds a checkpoint alone."""

MIN_QUEUE = 1024
"""Outdated places in the order of eviction that are not worth tidying up."""


class Index:
    """The records of a folder. Those whose parent is missing are orphans: never found."""

    def __init__(self) -> None:
        self.bytes = 0
        self.newest_ns = 0
        """The latest use of any file, so that a clock going back does not reorder them."""
        self.layouts: list[Layout] = []
        self._numbers: dict[Layout, int] = {}
        self._records: dict[str, Record] = {}
        self._below: dict[str, dict[int, dict[int, list[Record]]]] = {}
        """What hangs on a file (or a namespace), by where, and by the first token."""
        self._orphans: set[str] = set()
        self._order: list[tuple[int, int, str]] = []
        self._reading: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: str) -> bool:
        return key in self._records

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    @property
    def orphans(self) -> int:
        """Files that nothing can be restored from."""
        return len(self._orphans)

    def is_orphan(self, record: Record) -> bool:
        """Whether nothing can be restored from a file, because its parent is missing."""
        return record.key in self._orphans

    def get(self, key: str) -> Record | None:
        """The record of a name."""
        return self._records.get(key)

    def number_of(self, layout: Layout) -> int:
        """The number of a layout, a new one if need be."""
        if layout not in self._numbers:
            self._numbers[layout] = len(self.layouts)
            self.layouts.append(layout)
        return self._numbers[layout]

    def add(self, record: Record) -> None:
        """Take a file in, instead of one of the same name."""
        if record.key in self._records:
            self._unlink(self._records[record.key])
        self._link(record)
        if self._hangs(record):
            self._adopt(record)
        else:
            self._orphans.add(record.key)
        self._queue(record)

    def fill(self, records: list[Record]) -> None:
        """Take all files in, where none was."""
        assert not self._records
        self._records = {record.key: record for record in records}
        self.bytes = sum(record.size for record in records)
        self.newest_ns = max((record.used_ns for record in records), default=0)
        # Parents first.
        for record in sorted(records, key=attrgetter("start")):
            self._place(record)
            if not self._hangs(record):
                self._orphans.add(record.key)
        self._reorder()

    def remove(self, record: Record) -> None:
        """Forget a file; those below it become orphans."""
        if self._records.get(record.key) is not record:
            return
        self._unlink(record)
        self._orphans.discard(record.key)
        todo = [record.key]
        while todo:
            for below in self._children(todo.pop()):
                if below.key not in self._orphans:
                    self._orphans.add(below.key)
                    todo.append(below.key)
        parent = self._records.get(record.parent)
        if parent is not None:
            self._queue(parent)

    def use(self, record: Record, now_ns: int) -> None:
        """A file was used just now."""
        self.newest_ns = record.used_ns = max(now_ns, self.newest_ns)
        self._queue(record)

    def pin(self, record: Record) -> None:
        """Keep a file until `unpin`: it is read, or something is about to hang on it."""
        self._reading[record.key] += 1

    def unpin(self, record: Record) -> None:
        """Undo one `pin`."""
        self._reading[record.key] -= 1
        if not self._reading[record.key]:
            del self._reading[record.key]
            self._queue(record)

    def victim(self) -> Record | None:
        """The file to let go first: an orphan, else the least recently used that nothing hangs on.

        None if all are being read.
        """
        for key in self._orphans:
            if self._may_go(key):
                return self._records[key]
        while self._order:
            used_ns, _, key = self._order[0]
            record = self._records.get(key)
            if record is not None and record.used_ns == used_ns and self._may_go(key):
                return record
            heapq.heappop(self._order)
        return None

    def chains(self, namespace: str, tokens: Tokens) -> Iterator[Chain]:
        """Every way to follow a prompt that no other extends."""
        data = tokens.tobytes()
        todo: list[tuple[str, _Step | None]] = [(namespace, None)]
        while todo:
            parent, step = todo.pop()
            reached, extends = step.stop if step is not None else 0, False
            for record in self._following(parent, reached, tokens):
                if record.key in self._orphans or not _may_follow(step, record):
                    continue
                is_whole = data.startswith(record.tokens, 4 * record.start)
                stop = record.stop if is_whole else record.start + record.agreement(tokens)
                todo.append((record.key, _Step(record, stop, step)))
                extends = extends or record.start == reached
            if step is not None and not extends:
                yield self._chain(step)

    def check_integrity(self) -> None:
        """Assert that all parts agree."""
        assert self.bytes == sum(record.size for record in self)
        placed = [record for parent in self._below for record in self._children(parent)]
        assert {id(record) for record in placed} == {id(record) for record in self}
        assert len(placed) == len(self._records)
        assert all(self._below.values())
        for record in self:
            assert (record.key in self._orphans) == (not self._hangs(record)), record
            assert record in self._below[record.parent][record.start][_first(record)]

    def _following(self, parent: str, agreed: int, tokens: Tokens) -> Iterator[Record]:
        """What hangs on a file up to a token of it and begins as the prompt goes on."""
        for start, below in self._below.get(parent, _NOTHING).items():
            if start <= agreed and start < len(tokens):
                yield from below.get(int(tokens[start]), ())

    def _children(self, parent: str) -> list[Record]:
        below = self._below.get(parent, _NOTHING).values()
        return [record for at in below for records in at.values() for record in records]

    def _chain(self, last: "_Step") -> Chain:
        """The chain that ends with a step, and all checkpoints of its files up to where they are
        left.
        """
        layout = self.layouts[last.record.layout]
        links: list[Link] = []
        step, stop = last, last.stop
        while True:
            links.append(Link(step.record, step.record.start, stop))
            if step.above is None:
                break
            step, stop = step.above, step.record.start
        links.reverse()
        marks = dict(self._marks(links)) if layout.has_state else {}
        return Chain(layout, tuple(links), marks)

    def _marks(self, links: Iterable[Link]) -> Iterator[tuple[int, Record]]:
        for record, start, stop in links:
            for at, below in self._below.get(record.key, _NOTHING).items():
                if start < at <= stop and NO_TOKEN in below:
                    yield at, below[NO_TOKEN][0]
            if record.has_checkpoint and stop == record.stop:
                yield stop, record

    def _hangs(self, record: Record) -> bool:
        """Whether a chain without a gap leads to a file."""
        if record.parent == record.namespace:
            return record.start == 0
        parent = self._records.get(record.parent)
        if parent is None or parent.key in self._orphans:
            return False
        return parent.start < record.start <= parent.stop

    def _adopt(self, record: Record) -> None:
        """A file that hangs: so does what hangs on it."""
        todo = [record]
        while todo:
            each = todo.pop()
            self._orphans.discard(each.key)
            below = self._children(each.key)
            todo.extend(r for r in below if r.key in self._orphans and self._hangs(r))

    def _link(self, record: Record) -> None:
        self._records[record.key] = record
        self.bytes += record.size
        self.newest_ns = max(self.newest_ns, record.used_ns)
        self._place(record)

    def _place(self, record: Record) -> None:
        # Containers are only made where they stay: most files are the only one of their kind.
        below = self._below.get(record.parent)
        if below is None:
            below = self._below[record.parent] = {}
        at = below.get(record.start)
        if at is None:
            at = below[record.start] = {}
        first = _first(record)
        same = at.get(first)
        if same is None:
            at[first] = [record]
        else:
            same.append(record)

    def _unlink(self, record: Record) -> None:
        del self._records[record.key]
        self.bytes -= record.size
        below = self._below[record.parent]
        at, first = below[record.start], _first(record)
        at[first].remove(record)
        if not at[first]:
            del at[first]
        if not at:
            del below[record.start]
        if not below:
            del self._below[record.parent]

    def _may_go(self, key: str) -> bool:
        return key in self._records and key not in self._below and key not in self._reading

    def _queue(self, record: Record) -> None:
        if not self._may_go(record.key):
            return
        if len(self._order) > 2 * len(self._records) + MIN_QUEUE:
            self._reorder()
        heapq.heappush(self._order, (record.used_ns, -record.stop, record.key))

    def _reorder(self) -> None:
        leaves = (each for each in self if self._may_go(each.key))
        self._order = [(each.used_ns, -each.stop, each.key) for each in leaves]
        heapq.heapify(self._order)


class _Step(NamedTuple):
    """A file on the way along a prompt, which agrees with it up to `stop`."""

    record: Record
    stop: int
    above: "_Step | None"


def _may_follow(step: _Step | None, record: Record) -> bool:
    return step is None or step.record.layout == record.layout


def _first(record: Record) -> int:
    return int.from_bytes(record.tokens[:4], "little") if record.tokens else NO_TOKEN


_NOTHING: dict[int, dict[int, list[Record]]] = {}
