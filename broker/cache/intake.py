"""Taking in what was computed: only what is new below the matched path is copied."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from ..errors import CacheError
from ..trace.events import Split
from .extents import Extent, ExtentRange, pack
from .holdings import Holdings
from .kinds import Checkpoint, held_runs, layout_of, seal, snapshot, validate
from .layout import Layout
from .lease import PromptLease
from .logprobs import LOGPROB_BYTES, Logprobs
from .node import Node
from .prefix_hash import Tokens
from .reporter import Reporter
from .room import Room
from .runs import Runs, clean_runs, count_runs, intersect_runs, without_runs
from .segments import Segment, coverage, select
from .space import Space
from .tree import Walk
from .writes import ColdWrites


class Stored(NamedTuple):
    """What a `put` did: `new_tokens` of the sequence and `new_bytes` of KV were not there before.

    `refusal` says why nothing was stored, where that is no fault of the caller's: `off`, `oversize`
    (the sequence alone exceeds the budget), `no_room` (what could make room is leased or pinned).
    """

    new_tokens: int
    new_bytes: int
    refusal: str | None = None

    @property
    def stored(self) -> bool:
        """Whether the sequence is in the cache now."""
        return self.refusal is None


@runtime_checkable
class Row(Protocol):
    """A running row that can be stored as it stands, instead of a list of cache objects."""

    @property
    def layout(self) -> Layout: ...
    @property
    def length(self) -> int:
        """Tokens whose KV it holds."""
        ...

    def held(self) -> tuple[Runs, ...]:
        """The positions that it holds for each of `layout.groups`."""
        ...

    def cut(self, start: int, stop: int) -> Extent:
        """Copy tokens [start, stop) into a new extent."""
        ...

    def checkpoint(self) -> Checkpoint | None:
        """Owned copies of its state at `length`; None for a layout without state."""
        ...


class CacheRow:
    """A list of cache objects, as a row."""

    def __init__(self, caches: Sequence[Any]) -> None:
        self.caches = caches
        self.layout = layout_of(caches)

    def held(self) -> tuple[Runs, ...]:
        """The positions that the caches hold for each group of the layout."""
        return held_runs(self.caches, self.layout)

    def cut(self, start: int, stop: int) -> Extent:
        """Copy tokens [start, stop) into a new extent."""
        return seal(self.caches, self.layout, start, stop)

    def checkpoint(self) -> Checkpoint | None:
        """Owned copies of the state leaves."""
        return snapshot(self.caches, self.layout)

    def validate(self, length: int) -> None:
        """Raise `CacheError` unless the caches hold exactly `length` tokens."""
        validate(self.caches, self.layout, length)


class Intake:
    """Puts rows into the tree of their namespace."""

    def __init__(
        self, holdings: Holdings, room: Room, reporter: Reporter, writes: ColdWrites | None
    ) -> None:
        self._holdings = holdings
        self._room = room
        self._reporter = reporter
        self._writes = writes

    def store(
        self, space: Space, key: Tokens, row: Row | CacheRow, logprobs: Logprobs | None = None
    ) -> tuple[Stored, Node | None]:
        """Store a validated row; returns the node where it ends, if it was stored.

        Its `logprobs` are kept if there is room for them. Once the first byte is copied nothing can
        fail but the copy itself, which changes nothing.
        """
        layout, walk = row.layout, space.tree.walk(key)
        gaps = _window_gaps(row, walk)
        if self._is_oversize(layout, walk, len(key), gaps):
            return Stored(0, 0, "oversize"), None
        # Split first: what lies beyond the matched path may have to go.
        above = self.boundary(space, walk, walk.length) if walk.length else None
        with _held(above):
            beside = _logprob_bytes(above, logprobs)
            if beside and not self._admit(layout, above, len(key), gaps, beside):
                beside, logprobs = 0, None
            if not beside and not self._admit(layout, above, len(key), gaps):
                return Stored(0, 0, "no_room"), None
            before = self._holdings.total_bytes
            space.layout = layout
            if walk.length < len(key):
                node = self._append(space, key, row, walk.length)
            else:
                node = self._mark(space, key)
            self._fill(space, key, row, gaps)
            self._checkpoint(node, row)
            self._keep_logprobs(node, logprobs)
        return Stored(len(key) - walk.length, self._holdings.total_bytes - before), node

    def boundary(self, space: Space, walk: Walk, length: int) -> Node:
        """The node that ends at `length` on a walked path, split there if need be."""
        node = walk.node_at(length)
        if node.stop == length:
            return node
        upper = space.tree.split(node, length)
        self._divided(space, upper, node)
        return upper

    def _is_oversize(self, layout: Layout, walk: Walk, length: int, gaps: Runs) -> bool:
        """Whether the sequence exceeds the budget all by itself."""
        new = layout.bytes_per_token * (length - walk.length + count_runs(gaps))
        whole = _matched_bytes(walk) + new + layout.state_bytes
        return whole > self._room.max_bytes or layout.state_bytes > self._room.checkpoint_bytes

    def _admit(
        self, layout: Layout, above: Node | None, length: int, gaps: Runs, beside: int = 0
    ) -> bool:
        """Make room for what is new below `above`, and bytes beside it; whether there is enough."""
        matched = above.stop if above is not None else 0
        new = layout.bytes_per_token * (length - matched + count_runs(gaps))
        state = layout.state_bytes
        if above is not None and matched == length and above.checkpoint is not None:
            state = 0
        if state and not self._room.trim_checkpoints(state):
            return False
        return self._room.make(new + state + beside)

    def _append(self, space: Space, key: Tokens, row: Row | CacheRow, start: int) -> Node:
        extent = row.cut(start, len(key))
        span = self._holdings.adopt(extent, space.name)
        created = space.tree.insert(key, span).created
        assert created is not None
        self._holdings.settle(created)
        return created

    def _mark(self, space: Space, key: Tokens) -> Node:
        """Make a stored path an entry; it was used just now."""
        node = space.tree.insert(key).node
        space.tree.touch(node)
        return node

    def _checkpoint(self, node: Node, row: Row | CacheRow) -> None:
        if node.checkpoint is not None:
            self._holdings.use_checkpoint(node)
            return
        checkpoint = row.checkpoint()
        if checkpoint is not None:
            self._holdings.keep_checkpoint(node, checkpoint)

    def _keep_logprobs(self, node: Node, logprobs: Logprobs | None) -> None:
        if logprobs is None:
            return
        for each in node.path():
            part = logprobs[each.start : each.stop]
            if not np.isnan(part).all():
                self._holdings.keep_logprobs(each, part)

    def _fill(self, space: Space, key: Tokens, row: Row | CacheRow, gaps: Runs) -> None:
        """Give the nodes above what their window layers lack and this row still has."""
        walk = space.tree.walk(key)
        for start, stop in gaps:
            while start < stop:
                node = walk.node_at(start + 1)
                if node.start < start:
                    self.boundary(space, walk, start)
                if node.stop > stop:
                    node = self.boundary(space, walk, stop)
                self._refill(space, node, row)
                start = node.stop

    def _refill(self, space: Space, node: Node, row: Row | CacheRow) -> None:
        held = node.span
        assert isinstance(held, ExtentRange)
        extent = _merged(held, row.cut(node.start, node.stop))
        if held.logprobs is not None:
            extent.keep_logprobs(node.start, held.logprobs)
        if self._writes is not None:
            self._writes.outdated(node)
        self._holdings.replace(node, self._holdings.adopt(extent, space.name))

    def _divided(self, space: Space, upper: Node, lower: Node) -> None:
        if self._writes is not None:
            self._writes.divided(upper, lower)
        self._reporter.emit(
            lambda now: Split(
                time=now,
                entry=str(space.tree.name(lower)),
                namespace=space.name,
                at=upper.stop,
            )
        )


@contextmanager
def _held(node: Node | None) -> Iterator[None]:
    """Keep a node, and so all above it, in the tree."""
    if node is not None:
        node.tree.lease(node)
    try:
        yield
    finally:
        if node is not None:
            node.tree.release(node)


def _logprob_bytes(above: Node | None, logprobs: Logprobs | None) -> int:
    """Bytes that keeping these of a path, of which the part down to `above` is stored, takes."""
    if logprobs is None:
        return 0
    known = ~np.isnan(logprobs)
    path = above.path() if above is not None else []
    spans = [node.span for node in path if known[node.start : node.stop].any()]
    bare = {s.extent for s in spans if isinstance(s, ExtentRange) and s.extent.logprobs is None}
    new = known[above.stop if above is not None else 0 :]
    return LOGPROB_BYTES * (sum(map(len, bare)) + (len(new) if new.any() else 0))


def _matched_bytes(walk: Walk) -> int:
    """Exact KV bytes of the matched tokens."""
    total = 0
    for node in walk.path:
        if isinstance(node.span, ExtentRange):
            total += node.span.extent.bytes_between(node.start, min(node.stop, walk.length))
    return total


def _window_gaps(row: Row | CacheRow, walk: Walk) -> Runs:
    """The matched positions that the row holds for some window layer and no node does."""
    if not row.layout.has_windows:
        return ()
    missing: list[tuple[int, int]] = []
    spans = [node.span for node in walk.path if isinstance(node.span, ExtentRange)]
    matched = ((0, walk.length),)
    for index, offered in enumerate(row.held()):
        stored = clean_runs(run for span in spans for run in span.runs(index))
        missing.extend(without_runs(intersect_runs(offered, matched), stored))
    return clean_runs(missing)


def _merged(held: ExtentRange, fresh: Extent) -> Extent:
    """`fresh`, with what only `held` has for some window layer."""
    layout = fresh.layout
    runs = tuple(
        clean_runs([*fresh.runs[index], *held.runs(index)]) for index in range(len(layout.groups))
    )
    if runs == fresh.runs:
        return fresh

    def segments(leaf: int) -> list[Segment]:
        ours = fresh.segments(leaf, fresh.start, fresh.stop)
        theirs = held.segments(leaf)
        lacking = without_runs(coverage(theirs), coverage(ours))
        return sorted([*ours, *select(theirs, lacking)], key=lambda segment: segment.start)

    return pack(layout, fresh.start, fresh.stop, runs, segments)


def validated(
    key: Tokens,
    caches: Sequence[Any] | Row,
    space: Space,
    lease: PromptLease | None = None,
    logprobs: Logprobs | None = None,
) -> Row | CacheRow:
    """What is to be stored, as a row; raises `CacheError` if something speaks against it."""
    if not len(key):
        raise CacheError("an entry needs at least one token; got 0")
    if logprobs is not None and (logprobs.dtype != np.float32 or len(logprobs) != len(key)):
        raise CacheError(
            f"{len(logprobs)} log-probabilities of {logprobs.dtype} for {len(key)} tokens; as many "
            "of float32 are needed"
        )
    if lease is not None:
        _require_lease(key, space, lease)
    if isinstance(caches, Row):
        if caches.length != len(key):
            raise CacheError(f"the row holds {caches.length} tokens; the key has {len(key)}")
        row: Row | CacheRow = caches
    else:
        row = CacheRow(caches)
        row.validate(len(key))
    if space.layout is not None:
        space.layout.require(row.layout)
        if isinstance(row, CacheRow):
            row.layout = space.layout
    return row


def _require_lease(key: Tokens, space: Space, lease: PromptLease) -> None:
    length = lease.length
    if lease.namespace != space.name:
        raise CacheError(f"a lease of namespace {lease.namespace!r} put into {space.name!r}")
    if length > len(key) or not (key[:length] == lease.tokens).all():
        raise CacheError(f"the lease's {length} tokens do not begin the {len(key)} tokens put")
