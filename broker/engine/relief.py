"""Who gets memory, and who gives it back: what pressure, priorities and slices come to."""

import math
from collections.abc import Mapping

from ..cache.ledger import Purpose
from ..cache.prompt_cache import PromptCache
from ..request import RequestId
from ..trace import events
from ..trace.recorder import Recorder
from .endings import Endings
from .memory import RowMemory
from .pressure import Level, Measures, MemoryWatch, PressureStatistics, Reading
from .probe import MemoryProbe, empty_pool
from .row import Row
from .scheduler import Scheduler


class Relief:
    """Watches what the process takes, and takes rows out of their lanes to go on later."""

    def __init__(
        self,
        rows: Mapping[RequestId, Row],
        scheduler: Scheduler,
        memory: RowMemory,
        endings: Endings,
        cache: PromptCache,
        recorder: Recorder,
    ) -> None:
        self._rows = rows
        self._scheduler = scheduler
        self._memory = memory
        self._endings = endings
        self._cache = cache
        self._recorder = recorder
        self._granted: Row | None = None
        self._watch = MemoryWatch(
            MemoryProbe(),
            Measures(empty_pool, cache.shrink, self.preempt),
            fixed=lambda: memory.ledger.used(Purpose.WEIGHTS),
            on_change=self._note_pressure,
            clock=recorder.now,
        )

    def check(self) -> None:
        """Look whether memory runs short, now and then, and do what there is to be done."""
        self._watch.check()

    def statistics(self, wired_limit: int) -> PressureStatistics:
        """What the process takes."""
        return self._watch.statistics(wired_limit)

    def may_run(self, request: RequestId) -> bool:
        """Whether a request may run now. Under memory pressure nobody starts beside others.

        Who may has its memory from now on. Who had before it, but has not started, gives that back:
        else two who wait for each other could have what the other lacks.
        """
        row = self._rows[request]
        before, self._granted = self._granted, row
        if before is not None and before is not row and before.admitted is None:
            self._memory.release(before)
        if self._watch.pauses and row.memory is None:
            if any(each.memory is not None for each in self._rows.values()):
                return False
        return self._memory.is_granted(row)

    def shortage(self, request: RequestId) -> float:
        """Bytes that other rows would have to give up for one to run; under pressure none can."""
        row = self._rows[request]
        return math.inf if self._watch.pauses and row.memory is None else self._memory.lack(row)

    def promised(self, request: RequestId) -> int:
        """Bytes that a request would give back."""
        memory = self._rows[request].memory
        return memory.remaining if memory is not None else 0

    def suspend(self, row: Row, by: str, reason: events.PreemptionReason) -> None:
        """Take a row out of its lane; what it computed is put, and it is queued again."""
        reads = row.lane.reads(row)
        # What it will not come to use now may be what it takes to store the rest.
        held = row.lane.kv_bytes(len(row.prompt) + len(row.output) - reads, reads)
        self._memory.trim(row, held)
        kept = row.lane.keep(row)
        row.suspend(self._recorder.now(), kept)
        self._memory.release(row)
        self._recorder.note(
            events.Preempted,
            request=row.id,
            by=by,
            reason=reason,
            output_tokens=len(row.output),
            kept_tokens=kept,
        )
        self._scheduler.preempted(row.id, row.sequence)

    def preempt(self, nbytes: int) -> None:
        """Take memory from rows that run, once the cache has no more to give; one goes on."""
        for request in self._scheduler.expendable():
            if nbytes <= 0:
                return
            row = self._rows[request]
            nbytes -= self.promised(request)
            self._endings.guarded(row, self.suspend, "", "memory")

    def _note_pressure(self, before: Level, reading: Reading) -> None:
        active, pool, footprint, limit = reading
        self._recorder.note(
            events.Pressure,
            level=self._watch.level.value,
            before=before.value,
            active=active,
            pool=pool,
            footprint=footprint,
            limit=limit,
            cache=self._cache.total_bytes,
        )
        if not self._watch.pauses:
            self._scheduler.memory_changed()
