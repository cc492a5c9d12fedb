"""Letting lanes compute: parts of prompts, what is stored of them, decode steps."""

from collections.abc import Mapping, Sequence

from ..request import RequestId
from ..trace import events
from ..trace.recorder import Recorder
from .endings import Endings
from .lane import Lane
from .memory import RowMemory
from .row import Row
from .scheduler import Scheduler
from .work import Part


class Computing:
    """Does what the scheduler wants computed, and tells it what became of it. What goes wrong for a
    row ends that row; a step that fails ends the rows of its lane.
    """

    def __init__(
        self,
        rows: Mapping[RequestId, Row],
        scheduler: Scheduler,
        memory: RowMemory,
        endings: Endings,
        recorder: Recorder,
    ) -> None:
        self._rows = rows
        self._scheduler = scheduler
        self._memory = memory
        self._endings = endings
        self._recorder = recorder
        self._spans: dict[str, tuple[tuple[int, int], ...]] = {}

    def prefill(self, parts: Sequence[Part]) -> None:
        """Long prompts one after the other, what is to be computed in the batch in one go."""
        together: list[tuple[Row, int]] = []
        for request, _, stop in parts:
            row = self._rows[request]
            self._endings.guarded(row, self._seat_early)
            if row.lane.holds(row):
                together.append((row, stop))
            elif row.id in self._rows:
                self._endings.guarded(row, self._prefill_alone, stop)
        if together:
            self._prefill_together(together)

    def store(self, row: Row, shared: int) -> None:
        """Put what a row has computed; others want its first `shared` tokens."""
        kept = row.lane.store(row, shared)
        if kept and row.lane.holds(row):
            self._settle(row)
        if self._scheduler.stored(row.id, kept=kept):
            self.join(row)

    def join(self, row: Row) -> None:
        """Let a row, whose prompt is computed up to its last token, decode."""
        row.lane.join(row)
        self._settle(row)
        row.joined = self._recorder.now()

    def decode(self, lane: Lane) -> None:
        """One step of a lane, and what comes of it."""
        began = self._recorder.now()
        try:
            tokens = lane.step()
        except Exception as error:
            lost = lane.rows
            lane.reset()
            for row in lost:
                self._endings.fail(row, error)
            return
        now = self._recorder.now()
        if tokens:
            self._note_step(lane, min(len(tokens), lane.max_rows), now - began)
        self._endings.receive(tokens, now)

    def _seat_early(self, row: Row) -> None:
        if row.lane.can_seat(row):
            self._seat(row)

    def _prefill_alone(self, row: Row, stop: int) -> None:
        start, began = row.position, self._recorder.now()
        row.lane.prefill(row, stop)
        self._prefilled(row, start, self._recorder.now() - began)

    def _prefill_together(self, parts: Sequence[tuple[Row, int]]) -> None:
        starts, began = [row.position for row, _ in parts], self._recorder.now()
        try:
            parts[0][0].lane.prefill_together(parts)
        except Exception as error:
            for row, _ in parts:
                self._endings.fail(row, error)
            return
        seconds = self._recorder.now() - began
        for (row, _), start in zip(parts, starts, strict=True):
            self._endings.guarded(row, self._prefilled, start, seconds)

    def _prefilled(self, row: Row, start: int, seconds: float) -> None:
        stop = row.position
        self._recorder.note(
            events.PrefillChunk, request=row.id, start=start, stop=stop, seconds=seconds
        )
        lasting = row.lane.donates and row.lane.holds(row)
        if self._scheduler.prefilled(row.id, stop, lasting=lasting):
            self.join(row)

    def _seat(self, row: Row) -> None:
        row.lane.seat(row)
        self._settle(row)

    def _settle(self, row: Row) -> None:
        self._memory.settle(row, row.lane.reads(row))

    def _note_step(self, lane: Lane, rows: int, seconds: float) -> None:
        spans = tuple(lane.spans)
        if spans != self._spans.get(lane.name, ()):
            self._spans[lane.name] = spans
            self._recorder.note(events.Shared, rows=rows, spans=spans, model=lane.name)
        self._recorder.note(events.DecodeStep, rows=rows, seconds=seconds, model=lane.name)
