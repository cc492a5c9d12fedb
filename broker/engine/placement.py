"""Where the KV of a batch's rows lies in a step: the spans that they share, and their own tails."""

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from ..cache.extents import Extent
from ..cache.layout import Layout, TokenLeaf
from ..cache.segments import Segment, select
from .batch_caches import StepState
from .decode_plan import DecodePlan, Group
from .seat import Seat, path_segments
from .shared_attention import Span
from .sharing import Sharing, share
from .slabs import TailSlabs

Afford = Callable[[Seat, int], bool]
"""Asks for the memory of a seat that reads only so many tokens where they lie."""


class Placement:
    """The slabs of a batch, and the spans of its steps: at most `max_spans` in each, unless what
    they leave out cannot be copied: `afford` says so.
    """

    def __init__(
        self, layout: Layout, max_spans: int, afford: Afford = lambda seat, reach: True
    ) -> None:
        self.slabs = TailSlabs(layout)
        self._layout = layout
        self._max_spans = max_spans
        self._afford = afford
        self._spans: dict[tuple[Extent, int, int, int], Span] = {}

    def serving(self, seats: Sequence[Seat]) -> Sharing | None:
        """The spans of a step of these seats, if they reach over the paths of all of them."""
        sharing = self._share(seats)
        return sharing if sharing.reach == [seat.reach for seat in seats] else None

    def settle(self, seats: Sequence[Seat], sharing: Sharing | None = None) -> tuple[Sharing, bool]:
        """Give new seats a tail, and tails what no span serves; the spans of a step of these seats,
        which may be known, and whether tails have moved.
        """
        if sharing is None:
            sharing = self._share(seats)
        pairs = zip(seats, sharing.reach, strict=True)
        if not all(self._afford(seat, reach) for seat, reach in pairs if reach < seat.reach):
            # Slower where kernels take no more, but in the memory that there is.
            sharing = share([seat.path for seat in seats], None)
            for seat in seats:
                self._afford(seat, seat.reach)
        added: list[tuple[Seat, int, Sequence[Sequence[Segment]]]] = []
        for seat, reach in zip(seats, sharing.reach, strict=True):
            is_new = not seat.tail.capacity
            count = (seat.length if is_new else seat.reach) - reach
            if count:
                source = seat.segments or path_segments(self._layout, seat.path)
                seat.cut_path(reach)
                added.append((seat, count, source))
            elif is_new:
                added.append((seat, 0, ()))
        moved = self.slabs.make_room([(seat.tail, count) for seat, count, _ in added])
        for seat, count, source in added:
            self._fill(seat, count, source)
        return sharing, moved

    def step_of(self, seats: Sequence[Seat], counts: Sequence[int], sharing: Sharing) -> StepState:
        """A step in which each seat forwards `counts` tokens, which become rows of their own, the
        tokens of a seat one after the other.
        """
        rows = _TokenRows(seats, counts)
        plans: dict[int, DecodePlan] = {}
        spans: dict[int, list[Span]] = {}
        used: dict[tuple[Extent, int, int, int], Span] = {}
        for index, leaf in enumerate(self._layout.leaves):
            if not isinstance(leaf, TokenLeaf):
                continue
            window = leaf.retention.window
            groups, spans[index] = self._groups(index, window, rows, sharing, used)
            if window not in plans:
                plans[window] = DecodePlan(
                    groups,
                    (rows.used + rows.turn + 1).tolist(),
                    slots=rows.begin.tolist(),
                    window=window,
                    positions=rows.reach.tolist(),
                )
        self._spans = used
        place = mx.array(rows.begin + rows.used + rows.turn, mx.int32)
        return StepState(mx.array(rows.length + rows.turn, mx.int32), place, plans, spans)

    def forget(self) -> None:
        """Nobody is left: keep no span."""
        self._spans = {}

    def _share(self, seats: Sequence[Seat]) -> Sharing:
        return share([seat.path for seat in seats], self._max_spans)

    def _groups(
        self,
        index: int,
        window: int,
        rows: "_TokenRows",
        sharing: Sharing,
        used: dict[tuple[Extent, int, int, int], Span],
    ) -> tuple[list[Group], list[Span]]:
        """The groups of one layer, and its KV of them: what some row of a group can see."""
        groups, spans = [], []
        for (extent, start, stop), readers in sharing.spans:
            oldest = min(rows.seats[at].length for at in readers) + 1 - window if window else 0
            for segment in extent.segments(index, max(start, min(oldest, stop)), stop):
                groups.append(Group(rows.of(readers), len(segment), segment.start))
                key = (extent, index, segment.start, segment.stop)
                if key not in used:
                    # An index would copy, even into an axis of one.
                    planes = (mx.squeeze(plane, 0) for plane in segment.planes)
                    used[key] = self._spans.get(key) or Span(*planes)
                spans.append(used[key])
        return groups, spans

    def _fill(self, seat: Seat, count: int, source: Sequence[Sequence[Segment]]) -> None:
        """Copy positions [reach, reach + count) into the front of a tail, as far as they exist."""
        start, stop = seat.reach, seat.reach + count
        for index, leaf in enumerate(self._layout.leaves if count else ()):
            if not isinstance(leaf, TokenLeaf):
                continue
            parts = select(source[index], ((start, stop),))
            for part in parts:
                self.slabs.fill(seat.tail, index, part.start - start, part.planes)
            # Only window layers lack tokens: those that no later token sees.
            at = stop
            for part in reversed(parts):
                at = part.start if part.stop == at else at
            if at > start:
                seat.first_held[index] = max(at, seat.first_held.get(index, 0))
        seat.segments = ()


class _TokenRows:
    """The rows of a step, one for each token: seat by seat, `turn` 0, 1, ... within a seat.

    The other arrays `[rows]` hold what the seat of each row says.
    """

    def __init__(self, seats: Sequence[Seat], counts: Sequence[int]) -> None:
        self.seats = seats
        self._first = np.concatenate([[0], np.cumsum(counts)])
        turns = [np.arange(count) for count in counts]
        self.turn = np.concatenate(turns).astype(np.int32)
        tails = [seat.tail for seat in seats]
        self.begin, self.used, self.reach, self.length = (
            np.repeat(np.array(values, np.int32), counts)
            for values in (
                [tail.begin for tail in tails],
                [tail.used for tail in tails],
                [seat.reach for seat in seats],
                [seat.length for seat in seats],
            )
        )

    def of(self, seats: Sequence[int]) -> list[int]:
        """The rows of these seats, which are given by their numbers."""
        first = self._first
        return [row for at in seats for row in range(int(first[at]), int(first[at + 1]))]
