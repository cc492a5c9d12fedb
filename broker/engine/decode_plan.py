"""Which rows of a decode step share what, and how long their own tails are: made once a step."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from .kernels.schedule import Segment, runs_of
from .partials import bias_of

MASK_STEP = 16
"""Biases of tails come in multiples of this many tokens, so that few shapes are seen."""


class Group(NamedTuple):
    """Rows of the batch that attend to one shared span of `length` tokens.

    `start` is the absolute position of the span's first token; only windows look at it. A row may
    be in several groups (nested spans: one group for each node of the tree on its path) or none.
    """

    rows: Sequence[int]
    length: int
    start: int = 0


class Run(NamedTuple):
    """Rows [first, last), consecutive tokens of the tail in a slot: they see tokens [begin, end) of
    it, less what `bias` [last - first, end - begin] hides."""

    first: int
    last: int
    slot: int
    begin: int
    end: int
    bias: mx.array


class DecodePlan:
    """The rows of a decode step and their groups, for all layers of one kind.

    `lengths[n]` counts the tokens of row n's tail, the one of this step included (0 is allowed in a
    row with a span). Rows may be consecutive tokens of one tail, in order: each sees those before
    it. `slots[n]` is the slot of the slab that holds the tail (default n), `begins[n]` the first
    token in it that counts (default 0). With a `window` a row sees its last `window` positions
    only, and `positions[n]` is the absolute position of its tail's index 0.

    Layers with another window need a plan of their own; `advance` gives the plan of the next step
    without making the tables again. `made` keeps what was derived from the rows and groups.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        lengths: Sequence[int],
        *,
        slots: Sequence[int] | None = None,
        begins: Sequence[int] | None = None,
        window: int = 0,
        positions: Sequence[int] | None = None,
    ) -> None:
        self.rows = len(lengths)
        self.groups = tuple(groups)
        self.window = window
        self.host_lengths = list(lengths)
        self.host_slots = list(range(self.rows) if slots is None else slots)
        self.host_begins = [0] * self.rows if begins is None else list(begins)
        self.positions = [0] * self.rows if positions is None else list(positions)
        assert not window or positions is not None, "a window needs the rows' positions"
        assert all(0 <= row < self.rows for group in groups for row in group.rows)
        self.lengths = mx.array(self.host_lengths, mx.int32)
        self.slots = mx.array(self.host_slots, mx.int32)
        self.made: dict[Any, Any] = {}
        self._step: dict[Any, Any] = {}

    def advance(self) -> "DecodePlan":
        """The plan of the next step: the same rows and groups, every tail one token longer."""
        following = object.__new__(DecodePlan)
        following.__dict__.update(self.__dict__)
        following.host_lengths = [length + 1 for length in self.host_lengths]
        following.lengths = self.lengths + 1
        following._step = {}
        return following

    def segments(self) -> list[Segment]:
        """The groups' spans, less what no row of the group can see through its window."""
        segments = []
        for index, group in enumerate(self.groups):
            begin = 0
            if self.window and len(group.rows):
                begin = max(0, min(self._first_seen(row) for row in group.rows) - group.start)
            if begin < group.length and len(group.rows):
                segments.append(Segment(index + 1, 0, group.rows, begin, group.length, group.start))
        return segments

    def gather_places(self, heads: int) -> tuple[mx.array, mx.array]:
        """Where each row's KV heads are, `[heads, N]` each: among the matrices of queries
        `[heads, N, ...]` and among those of a slab `[slots, heads, ...]`."""
        key = "places", heads
        if key not in self.made:
            own = np.arange(heads * self.rows, dtype=np.uint32).reshape(heads, self.rows)
            slots = np.array(self.host_slots, np.uint32) * heads + np.arange(heads)[:, None]
            self.made[key] = mx.array(own), mx.array(slots.astype(np.uint32))
        found: tuple[mx.array, mx.array] = self.made[key]
        return found

    def span_rows(self, index: int) -> tuple[mx.array | slice, mx.array | None]:
        """How to pick a group's rows out of the batch, and where in them each row is (len(rows):
        nowhere); None if the group is the whole batch in order."""
        key = "rows", index
        if key not in self.made:
            self.made[key] = self._pick_rows(list(self.groups[index].rows))
        picked: tuple[mx.array | slice, mx.array | None] = self.made[key]
        return picked

    def span_bias(self, index: int, ratio: int) -> mx.array | None:
        """Bias [rows of the group * ratio, P] of what the window hides, each row `ratio` times;
        None without one."""
        if not self.window:
            return None
        key = "span", index, ratio
        if key not in self._step:
            group = self.groups[index]
            first = np.array([self._first_seen(row) - group.start for row in group.rows], np.int32)
            seen = mx.arange(group.length)[None] >= mx.array(np.repeat(first, ratio))[:, None]
            self._step[key] = bias_of(seen)
        bias: mx.array = self._step[key]
        return bias

    def tail_bias(self) -> mx.array:
        """Bias [N, T] of what each row does not see of its slot, T the longest tail."""
        if "tails" not in self._step:
            begins = np.array(self.host_begins)
            if self.window:
                begins = np.maximum(begins, np.array(self.host_lengths) - self.window)
            longest = max(1, *self.host_lengths) if self.rows else 1
            tokens = mx.arange(-(-longest // MASK_STEP) * MASK_STEP)[None]
            seen = tokens >= mx.array(begins.astype(np.int32))[:, None]
            self._step["tails"] = bias_of(seen & (tokens < self.lengths[:, None]))
        found: mx.array = self._step["tails"]
        return found

    def tail_runs(self) -> list["Run"]:
        """All rows, in order, as runs of consecutive tokens of one tail; empty if no tail has more
        than one row."""
        if "runs" not in self._step:
            runs = runs_of(self.host_lengths, self.host_slots)
            shared = len(runs) < self.rows
            self._step["runs"] = [self._run(*run) for run in runs] if shared else []
        found: list[Run] = self._step["runs"]
        return found

    def _run(self, first: int, last: int) -> "Run":
        begin, end = self.host_begins[first], self.host_lengths[last - 1]
        if self.window:
            begin = max(begin, self.host_lengths[first] - self.window)
        stop = max(end, begin + 1)  # one token at least, seen or not
        place, token = mx.arange(end - (last - first), end)[:, None], mx.arange(begin, stop)[None]
        seen = token <= place
        if self.window:
            seen = seen & (token > place - self.window)
        return Run(first, last, self.host_slots[first], begin, stop, bias_of(seen))

    def _first_seen(self, row: int) -> int:
        """The absolute position of the first token in a row's window."""
        return self.positions[row] + self.host_lengths[row] - self.window

    def _pick_rows(self, rows: list[int]) -> tuple[mx.array | slice, mx.array | None]:
        if rows == list(range(self.rows)):
            return slice(None), None
        places = np.full(self.rows, len(rows), np.int32)
        places[rows] = np.arange(len(rows))
        contiguous = bool(rows) and rows == list(range(rows[0], rows[-1] + 1))
        chosen = slice(rows[0], rows[-1] + 1) if contiguous else mx.array(rows, mx.int32)
        return chosen, mx.array(places)
