"""What the index keeps of a file, and chains of files that follow a prompt."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from ..layout import Layout
from ..prefix_hash import Tokens, common_prefix_length
from ..runs import Runs, clean_runs, count_runs, intersect_runs
from .header import Header


class Record(Struct, array_like=True, gc=False, eq=False, kw_only=True):
    """A file: see `Header`; `layout` is its number in the index. Its use and size, for eviction."""

    key: str
    parent: str
    namespace: str
    start: int
    stop: int
    tokens: memoryview
    layout: int
    runs: tuple[Runs, ...]
    has_checkpoint: bool
    size: int
    modified_ns: int
    used_ns: int

    @classmethod
    def of(
        cls, header: Header, layout: int, *, size: int, modified_ns: int, used_ns: int
    ) -> "Record":
        """The record of a file with this header."""
        return cls(
            key=header.key,
            parent=header.parent,
            namespace=header.namespace,
            start=header.start,
            stop=header.stop,
            tokens=memoryview(header.tokens),
            layout=layout,
            runs=header.runs,
            has_checkpoint=header.has_checkpoint,
            size=size,
            modified_ns=modified_ns,
            used_ns=used_ns,
        )

    def agreement(self, tokens: Tokens) -> int:
        """How many of its tokens agree with those of a prompt from its start on."""
        mine = np.frombuffer(self.tokens, np.uint32)
        return common_prefix_length(mine, tokens[self.start : self.stop])


class Link(NamedTuple):
    """Tokens [start, stop) of a file, as part of a chain."""

    record: Record
    start: int
    stop: int

    def runs(self, group: int) -> Runs:
        """The positions it holds for a group of the layout."""
        held = self.record.runs[group]
        if (self.start, self.stop) == (self.record.start, self.record.stop):
            return held
        return intersect_runs(held, ((self.start, self.stop),))


class Chain(NamedTuple):
    """Files that hold a prompt's first tokens without a gap, and its checkpoints by length."""

    layout: Layout
    links: tuple[Link, ...]
    marks: dict[int, Record]

    @property
    def stop(self) -> int:
        """How many tokens it agrees with."""
        return self.links[-1].stop if self.links else 0

    @property
    def records(self) -> set[Record]:
        """Its files, those of checkpoints included."""
        return {*(link.record for link in self.links), *self.marks.values()}

    def cut(self, length: int) -> "Chain":
        """The chain up to a length."""
        if length >= self.stop:
            return self
        links = tuple(
            Link(link.record, link.start, min(link.stop, length))
            for link in self.links
            if link.start < length
        )
        marks = {at: record for at, record in self.marks.items() if at <= length}
        return Chain(self.layout, links, marks)

    def usable(self, limit: int) -> int:
        """The greatest length up to `limit` at which a sequence can be restored."""
        layout = self.layout
        if not (layout.has_state or layout.has_windows):
            return min(self.stop, limit)
        return layout.valid_length(self.links, self.marks, limit).length

    def runs(self, group: int) -> Runs:
        """The positions that its files hold for a group."""
        return clean_runs(run for link in self.links for run in link.runs(group))


def needed_runs(links: Sequence[Link], layout: Layout, start: int, length: int) -> tuple[Runs, ...]:
    """What of [start, length) must be read for each group: window layers only need their last."""
    result = []
    for index, group in enumerate(layout.groups):
        held = clean_runs(run for link in links for run in link.runs(index))
        wanted = intersect_runs(group.retention.needed(length), ((start, length),))
        result.append(intersect_runs(held, wanted))
    return tuple(result)


def bytes_of(layout: Layout, runs: Sequence[Runs]) -> int:
    """Exact bytes of the positions of each group."""
    return sum(size * count_runs(held) for size, held in zip(layout.group_bytes, runs, strict=True))
