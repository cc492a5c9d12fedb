"""The engine's turns: asks the scheduler what is next, lets a lane do it, tells everybody.

Lives in the thread that owns MLX. Whatever goes wrong for one request ends that request; a step
that fails ends the rows of that step; the loop goes on.
"""

import logging
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import cast

from ..affinity import ThreadGuard
from ..cache.cold import Flushed
from ..cache.ledger import Ledger, Purpose, format_bytes
from ..cache.prefix_hash import Tokens
from ..cache.prompt_cache import PromptCache
from ..cache.restores import Restoration
from ..cache.ssd import SsdStore
from ..errors import BrokerClosed, QueueFull
from ..models import LoadedModel
from ..request import ModelInfo, RequestId, Started
from ..trace import events
from ..trace.recorder import Recorder
from .batch import BatchLane
from .endings import Endings, as_swarm_error, too_late
from .lane import Lane
from .memory import RowMemory, bounded_pool, device_limit
from .pressure import Level, Measures, MemoryWatch, Reading
from .probe import MemoryProbe, empty_pool, wired
from .restoring import Post, Restoring
from .roster import Drafts, ModelSource, Roster
from .row import Row
from .scheduler import Scheduler
from .served import Served
from .session_keeper import SessionKeeper, party_of
from .settings import EngineSettings, EngineStatistics
from .submission import Submission
from .work import Admit, Decode, Expire, Hold, Part, Preempt, Prefill, Store, Wait

_log = logging.getLogger(__name__)


IDLE_SECONDS = 600.0
"""What nobody has used for so long leaves RAM, once the cold tier has it and the engine rests."""

LOOK_SECONDS = 60.0
"""A resting engine looks for that so often."""

CLOSE_SECONDS = 10.0
"""What writes to the cold tier get to end when the broker is closed."""


class EngineLoop:
    """The worker of an `EngineThread`: models with their lanes, one prompt cache, one ledger.

    `model` is the first one, whose name is `source`'s unless that has another. `post` runs
    something in its thread, later; without it the cold tier is read in between.
    """

    def __init__(
        self,
        model: LoadedModel,
        recorder: Recorder,
        settings: EngineSettings,
        post: Post | None = None,
        source: ModelSource | None = None,
    ) -> None:
        self._guard = ThreadGuard()
        self._guard.check()
        self._settings = settings
        self._recorder = recorder
        self.ledger = Ledger(settings.memory or device_limit())
        self._cold = (
            SsdStore(settings.cold, settings.cold_bytes, ledger=self.ledger, model=model.name)
            if settings.cold
            else None
        )
        self.cache = PromptCache(settings.ram, cold=self._cold, ledger=self.ledger, trace=recorder)
        self._rows: dict[RequestId, Row] = {}
        self._spans: dict[str, tuple[tuple[int, int], ...]] = {}
        self._memory = RowMemory(self.ledger, self.cache, self._kv_bytes)
        self._pool = ExitStack()
        self._pool.enter_context(bounded_pool(self.ledger.limit))
        try:
            self._wired_limit = self._pool.enter_context(wired()) if settings.wired else 0
            first = self._serve(model)
        except BaseException:
            self._pool.close()
            if self._cold is not None:
                self._cold.close()
            raise
        self.roster = Roster(
            first,
            source or ModelSource(model.name),
            self._serve,
            self._rows,
            self.cache,
            self.ledger,
            recorder,
            settings.idle_unload,
        )
        self._restoring = Restoring(self._restored, post)
        if post is not None:
            # A resting thread is to wake up for the next write, and for who waits for its memory.
            self.cache.on_written = lambda: post(lambda: self.scheduler.memory_changed())
        self.sessions = SessionKeeper(
            self.cache, recorder, self._prefill_rate, lambda: self.scheduler.memory_changed()
        )
        self.scheduler = Scheduler(
            self.cache.peek_prefix_len,
            max_rows=settings.max_rows,
            clock=recorder.now,
            has_memory=self._may_run,
            may_start=self.sessions.policy.may_start,
            shortage=self._shortage,
            promised=self._promised,
            computed=self._computed,
        )
        self._looked_at = time.monotonic()
        self._watch = MemoryWatch(
            MemoryProbe(),
            Measures(empty_pool, self.cache.shrink, self._preempt),
            fixed=lambda: self.ledger.used(Purpose.WEIGHTS),
            on_change=self._note_pressure,
            clock=recorder.now,
        )
        self._endings = Endings(
            self._rows, self.scheduler, self._memory, recorder, self.sessions.ended
        )

    @property
    def model(self) -> LoadedModel:
        """The first model."""
        return self.roster.serving().model

    @property
    def lane(self) -> BatchLane:
        """The batch lane of the first model."""
        return self.roster.serving().batch

    def load(self, name: str, source: ModelSource) -> tuple[ModelInfo, LoadedModel]:
        """Put one more model, or an adapter, into service; nothing else goes on meanwhile.

        Raises `InvalidRequest` for a name that is taken, `OutOfMemory` where the weights do not fit
        beside the others, and what loading raises; nothing has changed then.
        """
        self._guard.check()
        return self.roster.add(name, source)

    def alias(self, name: str, existing: str) -> ModelInfo:
        """Give a model one more name."""
        self._guard.check()
        return self.roster.alias(name, existing)

    def unload(self, name: str) -> list[str]:
        """Let go of a model, and of the adapters over it; their names. What was computed with them
        stays cached. Raises `ModelNotFound`, and `ModelBusy` while requests to it are open.
        """
        self._guard.check()
        names = self.roster.remove(name)
        self.scheduler.memory_changed()
        return names

    def models(self) -> tuple[ModelInfo, ...]:
        """All models that requests can name."""
        return self.roster.infos()

    def submit(self, submission: Submission) -> None:
        """Queue a request, or fail it before anything has changed."""
        self._guard.check()
        try:
            self._require_room()
            served = self.roster.serving(submission.request.model)
            row = served.row_for(submission)
            self._memory.require_possible(row)
            if row.deadline is not None and row.deadline <= self._recorder.now():
                raise too_late(row, self._recorder.now())
        except Exception as error:
            submission.mailbox.fail(as_swarm_error(error, "could not be prepared", submission.id))
            return
        self._rows[row.id] = row
        if self._cold is not None:
            self._cold.models[row.namespace] = served.model.name
        request = row.request
        self._recorder.note(
            events.Queued,
            submitted=row.submitted,
            request=row.id,
            agent=request.agent,
            swarm=request.swarm,
            namespace=row.namespace,
            prompt_tokens=len(row.prompt),
            max_tokens=row.max_tokens,
            tenant=request.tenant,
            priority=request.priority,
            deadline=request.deadline,
            others=self.scheduler.queued,
            model=request.model,
        )
        self.sessions.submitted(row)
        # Nobody waits for what a cache of no size will not have.
        namespace = row.namespace if row.reads_cache and self.cache.max_bytes else None
        self.scheduler.submit(
            row.id,
            row.prompt,
            namespace,
            row.boundaries,
            max_tokens=row.max_tokens,
            lane=row.lane,
            party=party_of(row),
            priority=request.priority,
            deadline=row.deadline,
            alternatives=row.lacking_alternatives,
        )

    def cancel(self, request: RequestId) -> None:
        """End a request in whatever state it is; what it computed is kept. Late ones do nothing."""
        self._guard.check()
        row = self._rows.get(request)
        if row is not None:
            self._endings.guarded(row, self._endings.end, "cancelled")

    def flush(self, seconds: float) -> Flushed:
        """Write what only RAM has to the cold tier; what is left when the time is over."""
        return self.cache.flush(seconds)

    def statistics(self) -> EngineStatistics:
        """What is going on, and what it has cost."""
        return EngineStatistics(
            requests=self.scheduler.statistics(),
            sessions=self.sessions.statistics(),
            usage=self._endings.usage,
            models=self.roster.statistics(),
            cache=self.cache.statistics(),
            memory=self.ledger.statistics(),
            pressure=self._watch.statistics(self._wired_limit),
        )

    def check_integrity(self) -> None:
        """Assert that scheduler, lane and cache agree with the open requests."""
        self.scheduler.check_integrity()
        self.sessions.policy.check_integrity()
        self.cache.check_integrity()
        counts = self.scheduler.statistics()
        leases = sum(row.leases for row in self._rows.values())
        holders = sum(row.leases > 0 for row in self._rows.values())
        lanes = list(self.roster.lanes)
        assert counts.decoding == sum(len(lane.running) for lane in lanes)
        open_rows = counts.restoring + counts.prefilling + counts.decoding
        assert open_rows >= holders
        assert leases == self.cache.statistics().leases
        for lane in lanes:
            lane.check_integrity()
        self.ledger.check_integrity()
        promised = sum(row.memory.remaining for row in self._rows.values() if row.memory)
        assert self.ledger.used(Purpose.TAILS) == promised
        models = self.roster.statistics().values()
        assert sum(model.lane.batch.tails.used_bytes for model in models) <= promised
        for row in (row for lane in lanes for row in lane.rows):
            assert row.memory is not None
            assert row.memory.remaining == self._kv_bytes(row, row.lane.reads(row))

    def turn(self) -> bool:
        """Do the next piece of work; False if there is none."""
        self._guard.check()
        self._relieve()
        if self.sessions.policy.is_due():
            self.scheduler.memory_changed()
        try:
            return self._turn()
        except Exception as error:  # nobody else would end these requests
            for lane in self.roster.lanes:
                lane.reset()
            for row in list(self._rows.values()):
                self._endings.fail(row, error)
            return True

    def patience(self) -> float:
        """Seconds until something may be due without a command: a deadline, a session that need no
        longer wait, a look for idle models.
        """
        changes = [self.roster.next_look, self.sessions.policy.next_change()]
        deadline = self.scheduler.next_deadline()
        soonest = min(changes if deadline is None else [*changes, deadline])
        return max(soonest - self._recorder.now(), 0.0)

    def close(self) -> None:
        """Fail what is open as closed, release every lease, end the lane, the tiers and the trace.

        Writes to the cold tier get `CLOSE_SECONDS` to end; a disk that hangs keeps nobody longer
        than that and the store's last seconds.
        """
        self._guard.check()
        deadline = time.monotonic() + CLOSE_SECONDS
        for row in list(self._rows.values()):
            with suppress(Exception):  # the reader is told first of all
                self._endings.fail(
                    row, BrokerClosed(f"the broker was closed while {row.id} was open")
                )
        with ExitStack() as last:
            last.callback(self._pool.close)
            last.callback(self._recorder.close)
            if self._cold is not None:
                cold = self._cold
                last.callback(lambda: cold.close(_left(deadline)))
            last.callback(self.cache.clear)
            last.callback(lambda: self._restoring.close(_left(deadline)))
            if self._cold is not None:
                last.callback(lambda: self._flush_last(_left(deadline)))
            last.callback(self.roster.close)

    def _flush_last(self, seconds: float) -> None:
        left = self.cache.flush(seconds)
        # Of a folder that is only read this was said when it was opened.
        if left.writes and not (self._cold and self._cold.is_read_only):
            missing = format_bytes(left.bytes)
            _log.warning("closed before all sequences were on disk: %s are missing", missing)

    def _relieve(self) -> None:
        try:
            self._watch.check()
            if self.roster.unload_idle():
                self.scheduler.memory_changed()
        except Exception:  # nobody's request is to end for this
            _log.exception("memory pressure was not relieved")

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
            cache=self.cache.total_bytes,
        )
        if not self._watch.pauses:
            self.scheduler.memory_changed()

    def _preempt(self, nbytes: int) -> None:
        """Take memory from rows that run, once the cache has no more to give; one goes on."""
        for request in self.scheduler.expendable():
            if nbytes <= 0:
                return
            row = self._rows[request]
            nbytes -= self._promised(request)
            self._endings.guarded(row, self._suspend, "", "memory")

    def _suspend(self, row: Row, by: str, reason: events.PreemptionReason) -> None:
        """Take a row out of its lane; what it computed is put, and it is queued again."""
        reads = row.lane.reads(row)
        # What it will not come to use now may be what it takes to store the rest.
        held = row.lane.kv_bytes(len(row.prompt) + len(row.output) - reads, reads)
        self._memory.trim(row, held)
        kept = row.lane.keep(row)
        row.suspend(self._recorder.now())
        self._memory.release(row)
        self._recorder.note(
            events.Preempted,
            request=row.id,
            by=by,
            reason=reason,
            output_tokens=len(row.output),
            kept_tokens=kept,
        )
        self.scheduler.preempted(row.id, row.sequence)

    def _promised(self, request: RequestId) -> int:
        memory = self._rows[request].memory
        return memory.remaining if memory is not None else 0

    def _shortage(self, request: RequestId) -> float:
        """Bytes that other rows would have to give up for one to run; under pressure none can."""
        row = self._rows[request]
        return math.inf if self._watch.pauses and row.memory is None else self._memory.lack(row)

    def _may_run(self, request: RequestId) -> bool:
        """Whether a request may run now. Under memory pressure nobody starts beside others."""
        row = self._rows[request]
        if self._watch.pauses and row.memory is None:
            if any(each.memory is not None for each in self._rows.values()):
                return False
        return self._memory.is_granted(row)

    def _turn(self) -> bool:
        match self.scheduler.next():
            case None:
                return self._rest()
            case Admit(request, not_worth_waiting):
                row = self._rows[request]
                self._endings.guarded(row, self._admit, not_worth_waiting)
            case Wait(request, leader, shared):
                self._recorder.note(
                    events.Waiting, request=request, leader=leader, shared_tokens=shared
                )
            case Hold(request, others):
                self._note_shortage(self._rows[request], others)
            case Preempt(request, for_, reason):
                self._endings.guarded(self._rows[request], self._suspend, for_, reason)
            case Expire(request):
                self._endings.guarded(self._rows[request], self._endings.expire)
            case Prefill(parts):
                self._prefill(parts)
            case Store(request, shared):
                row = self._rows[request]
                self._endings.guarded(row, self._store, shared)
            case Decode(lane):
                self._decode(cast(Lane, lane))  # they come from `submit`
        return True

    def _require_room(self) -> None:
        rows, queue = self._settings.max_rows, self._settings.max_queue
        if len(self._rows) >= rows + queue:
            raise QueueFull(
                f"{len(self._rows):,} requests are open: {rows:,} run at a time and {queue:,} may "
                "wait; ask again when some have ended"
            )

    def _note_shortage(self, row: Row, others: int) -> None:
        need, available = self._memory.shortage(row)
        self._recorder.note(
            events.Held, request=row.id, need=need, available=available, others=others
        )

    def _note_admission(self, row: Row, now: float) -> None:
        standing = self.scheduler.standing(row.id)
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

    def _rest(self) -> bool:
        """What there is to do while nobody asks for anything; whether there is more of it."""
        if self.cache.write_behind():
            return True
        now = time.monotonic()
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self.cache.demote_idle(IDLE_SECONDS)
            self.sessions.policy.forget()
        return False

    def _admit(self, row: Row, not_worth_waiting: bool) -> None:
        now = self._recorder.now()
        self.sessions.policy.started(row.id)
        if row.admitted is None:
            self._note_admission(row, now)
        row.admitted = now
        self._memory.require(row)
        if not self._restores(row):
            self._open(row, not_worth_waiting)

    def _restores(self, row: Row) -> bool:
        """Let a row wait for the cold tier, if that is to serve it."""
        if self._cold is None or not row.reads_cache:
            return False
        if self._restoring.is_busy:
            plan = self.cache.plan(row.sequence, row.namespace, row.lacking_alternatives)
            if not plan.cold_tokens:
                return False
            self.scheduler.restoring(row.id)
            self._restoring.wait(row)
            return True
        lacking = row.lacking_alternatives
        restoration = self.cache.restoration(row.sequence, row.namespace, lacking)
        if restoration is None:
            return False
        self.scheduler.restoring(row.id)
        self._restoring.begin(restoration, row)
        return True

    def _restored(self, restoration: Restoration, row: Row, later: Sequence[Row]) -> None:
        """Make what was read resident; who came meanwhile is to look again."""
        for each in reversed(later):
            if self._rows.get(each.id) is each:
                self.scheduler.restored(each.id)
        if self._rows.get(row.id) is row:
            self._endings.guarded(row, self._open, restoration=restoration)
        else:
            self._keep(restoration, row)

    def _keep(self, restoration: Restoration, row: Row) -> None:
        """Make what was read resident although nobody waits for it any more."""
        try:
            lease = self.cache.lease(row.sequence, row.namespace, restoration)
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
        if self.scheduler.admitted(row.id, row.position, self._put_points(row)):
            self._join(row)

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

    def _put_points(self, row: Row) -> tuple[int, ...]:
        """Where the prompt cache, or the lane, wants the row's prefill to stop and store."""
        if not row.reads_cache:
            return ()
        wanted = self.cache.put_points(row.sequence, row.namespace, row.boundaries)
        return (*wanted, *row.lane.put_points(row.position, len(row.sequence) - 1))

    def _prefill(self, parts: Sequence[Part]) -> None:
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
        if self.scheduler.prefilled(row.id, stop, lasting=lasting):
            self._join(row)

    def _store(self, row: Row, shared: int) -> None:
        kept = row.lane.store(row, shared)
        if kept and row.lane.holds(row):
            self._settle(row)
        if self.scheduler.stored(row.id, kept=kept):
            self._join(row)

    def _computed(self, request: RequestId) -> Tokens:
        row = self._rows[request]
        return row.lane.computed(row)

    def _kv_bytes(self, row: Row, known: int) -> int:
        own = row.lane.kv_bytes(len(row.prompt) - known + row.max_tokens, known)
        return own + row.lane.draft_bytes(row)

    def _seat(self, row: Row) -> None:
        row.lane.seat(row)
        self._settle(row)

    def _settle(self, row: Row) -> None:
        self._memory.settle(row, row.lane.reads(row))

    def _join(self, row: Row) -> None:
        row.lane.join(row)
        self._settle(row)
        row.joined = self._recorder.now()

    def _decode(self, lane: Lane) -> None:
        self.cache.write_behind()
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

    def _note_step(self, lane: Lane, rows: int, seconds: float) -> None:
        spans = tuple(lane.spans)
        if spans != self._spans.get(lane.name, ()):
            self._spans[lane.name] = spans
            self._recorder.note(events.Shared, rows=rows, spans=spans, model=lane.name)
        self._recorder.note(events.DecodeStep, rows=rows, seconds=seconds, model=lane.name)

    def _prefill_rate(self) -> float:
        return max((served.pace.rate for served in self.roster.loaded()), default=0.0)

    def _serve(self, model: LoadedModel, base: LoadedModel | None = None, name: str = "") -> Served:
        return Served(
            model,
            self.cache,
            self.ledger,
            self._settings,
            lambda row, reach: self._memory.afford(row, reach),
            base,
            name,
            Drafts(lambda: self.roster),
        )


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
