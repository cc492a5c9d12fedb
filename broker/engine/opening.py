"""From the queue into a lane: memory, what the cache or the tier below has, and where to begin."""

import logging
from collections.abc import Callable, Mapping, Sequence

from ..cache.prompt_cache import PromptCache
from ..cache.restores import Restoration
from ..request import RequestId, Started
from ..trace import events
from ..trace.recorder import Recorder
from .endings import Endings
from .memory import RowMemory
from .restoring import Post, Restoring
from .row import Row
from .scheduler import Scheduler

_log = logging.getLogger(__name__)


class Opening:
    """Admits rows. `on_start` hears of each, `join` takes those with nothing left to prefill.

    `post` runs something in the engine's thread, later; without it the tier below is read in
    between.
    """

    def __init__(
        self,
        rows: Mapping[RequestId, Row],
        scheduler: Scheduler,
        memory: RowMemory,
        endings: Endings,
        cache: PromptCache,
        recorder: Recorder,
        on_start: Callable[[RequestId], None],
        join: Callable[[Row], None],
        post: Post | None,
    ) -> None:
        self._rows = rows
        self._scheduler = scheduler
        self._memory = memory
        self._endings = endings
        self._cache = cache
        self._recorder = recorder
        self._on_start = on_start
        self._join = join
        self._restoring = Restoring(self._restored, post)

    def admit(self, row: Row, not_worth_waiting: bool) -> None:
        """Give a row memory and its caches, or let it wait for the tier below."""
        now = self._recorder.now()
        self._on_start(row.id)
        if row.admitted is None:
            self._note_admission(row, now)
        row.admitted = now
        self._memory.require(row)
        if not self._restores(row):
            self._open(row, not_worth_waiting)

    def close(self, timeout: float) -> None:
        """Wait for a reading under way, at most `timeout` seconds."""
        self._restoring.close(timeout)

    def _restores(self, row: Row) -> bool:
        """Let a row wait for the cold tier, if that is to serve it."""
        if not row.reads_cache:
            return False
        if self._restoring.is_busy:
            plan = self._cache.plan(row.sequence, row.namespace, row.lacking_alternatives)
            if not plan.cold_tokens:
                return False
            self._scheduler.restoring(row.id)
            self._restoring.wait(row)
            return True
        lacking = row.lacking_alternatives
        restoration = self._cache.restoration(row.sequence, row.namespace, lacking)
        if restoration is None:
            return False
        self._scheduler.restoring(row.id)
        self._restoring.begin(restoration, row)
        return True

    def _restored(self, restoration: Restoration, row: Row, later: Sequence[Row]) -> None:
        """Make what was read resident; who came meanwhile is to look again."""
        for each in reversed(later):
            if self._rows.get(each.id) is each:
                self._scheduler.restored(each.id)
        if self._rows.get(row.id) is row:
            self._endings.guarded(row, self._open, restoration=restoration)
        else:
            self._keep(restoration, row)
            self._scheduler.memory_changed()

    def _keep(self, restoration: Restoration, row: Row) -> None:
        """Make what was read resident although nobody waits for it any more."""
        try:
            lease = self._cache.lease(row.sequence, row.namespace, restoration)
        except Exception:  # nobody's request is to end for this
            _log.exception("what was read for %s is lost", row.id)
        else:
            if lease is not None:
                lease.release()

    def _open(
        self, row: Row, not_worth_waiting: bool = False, restoration: Restoration | None = None
    ) -> None:
        is_new = not row.opened
        row.lane.open(row, restoration)
        plan = row.plan
        if is_new:
            self._recorder.note(
                events.Planned,
                request=row.id,
                prompt_tokens=len(row.prompt),
                ram_tokens=row.ram_tokens,
                cold_tokens=row.cold_tokens,
                prefilled_tokens=len(row.prompt) - row.position,
                donor=plan and plan.donor,
                reason="not_worth_waiting" if not_worth_waiting else plan and plan.reason,
                divergence=plan and plan.divergence,
            )
            row.mailbox.put(Started(row.id, len(row.prompt), row.ram_tokens, row.cold_tokens))
        else:
            self._note_resumption(row)
        if self._scheduler.admitted(row.id, row.position, self._put_points(row)):
            self._join(row)

    def _put_points(self, row: Row) -> tuple[int, ...]:
        """Where the prompt cache, or the lane, wants the row's prefill to stop and store."""
        if not row.reads_cache:
            return ()
        wanted = self._cache.put_points(row.sequence, row.namespace, row.boundaries)
        return (*wanted, *row.lane.put_points(row.position, len(row.sequence) - 1))

    def _note_admission(self, row: Row, now: float) -> None:
        standing = self._scheduler.standing(row.id)
        self._recorder.note(
            events.Admitted,
            request=row.id,
            seconds=now - row.queued,
            priority=row.request.priority,
            tenant_tokens=round(standing.tenant),
            swarm_tokens=round(standing.swarm),
            agent_tokens=round(standing.agent),
            others=standing.queued,
        )

    def _note_resumption(self, row: Row) -> None:
        cold = row.lease.cold_tokens if row.lease is not None else 0
        self._recorder.note(
            events.Resumed,
            request=row.id,
            output_tokens=len(row.output),
            ram_tokens=row.position - cold,
            cold_tokens=cold,
            prefilled_tokens=len(row.sequence) - row.position,
            reason=row.plan and row.plan.reason,
        )
