"""The engine's turns: asks the scheduler what is next, lets a lane do it, tells everybody.

Lives in the thread that owns MLX. Whatever goes wrong for one request ends that request; a step
that fails ends the rows of that step; the loop goes on.
"""

import logging
import time
from contextlib import ExitStack, suppress
from typing import cast

from ..affinity import ThreadGuard
from ..cache.cold import Flushed
from ..cache.ledger import Ledger, Purpose, format_bytes
from ..cache.prefix_hash import Tokens
from ..cache.prompt_cache import PromptCache
from ..cache.ssd import SsdStore
from ..errors import BrokerClosed, QueueFull
from ..models import LoadedModel, namespace_digest
from ..request import ModelInfo, RequestId
from ..trace import events
from ..trace.recorder import Recorder
from .batch import BatchLane
from .computing import Computing
from .endings import Endings, as_swarm_error, too_late
from .lane import Lane
from .memory import RowMemory, bounded_pool, device_limit
from .opening import Opening
from .probe import wired
from .relief import Relief
from .restoring import Post
from .roster import Drafts, ModelSource, Roster
from .row import Row
from .scheduler import Scheduler
from .served import Served
from .session_keeper import SessionKeeper, party_of
from .settings import EngineSettings, EngineStatistics
from .submission import Submission
from .work import Admit, Decode, Expire, Hold, Preempt, Prefill, Store, Wait

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
            has_memory=lambda request: self.relief.may_run(request),
            may_start=self.sessions.policy.may_start,
            shortage=lambda request: self.relief.shortage(request),
            promised=lambda request: self.relief.promised(request),
            computed=self._computed,
        )
        self._looked_at = time.monotonic()
        self._endings = Endings(
            self._rows, self.scheduler, self._memory, recorder, self.sessions.ended
        )
        parts = self._rows, self.scheduler, self._memory, self._endings
        self.relief = Relief(*parts, self.cache, recorder)
        self._computing = Computing(*parts, recorder)
        self._opening = Opening(
            *parts,
            self.cache,
            recorder,
            on_start=self.sessions.policy.started,
            join=self._computing.join,
            post=post,
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
            # A draft may have to be loaded, for which this model is not to go.
            request = submission.request
            with self.roster.held(request.model) as served:
                row = served.row_for(submission)
                self._memory.require_possible(row)
            if row.deadline is not None and row.deadline <= self._recorder.now():
                raise too_late(row, self._recorder.now())
        except Exception as error:
            submission.mailbox.fail(as_swarm_error(error, "could not be prepared", submission.id))
            return
        self._rows[row.id] = row
        self._name_in_cold(served.model, request.tenant)
        if request.draft:
            self._name_in_cold(self.roster.serving(request.draft).model, request.tenant)
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
            pressure=self.relief.statistics(self._wired_limit),
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
        self._keep_house()
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
            last.callback(lambda: self._opening.close(_left(deadline)))
            if self._cold is not None:
                last.callback(lambda: self._flush_last(_left(deadline)))
            last.callback(self.roster.close)

    def _flush_last(self, seconds: float) -> None:
        left = self.cache.flush(seconds)
        # Of a folder that is only read this was said when it was opened.
        if left.writes and not (self._cold and self._cold.is_read_only):
            missing = format_bytes(left.bytes)
            _log.warning("closed before all sequences were on disk: %s are missing", missing)

    def _keep_house(self) -> None:
        try:
            self.relief.check()
            if self.roster.unload_idle():
                self.scheduler.memory_changed()
        except Exception:  # nobody's request is to end for this
            _log.exception("memory was not given back")

    def _turn(self) -> bool:
        match self.scheduler.next():
            case None:
                return self._rest()
            case Admit(request, not_worth_waiting):
                row = self._rows[request]
                self._endings.guarded(row, self._opening.admit, not_worth_waiting)
            case Wait(request, leader, shared):
                self._recorder.note(
                    events.Waiting, request=request, leader=leader, shared_tokens=shared
                )
            case Hold(request, others):
                self._note_shortage(self._rows[request], others)
            case Preempt(request, for_, reason):
                self._endings.guarded(self._rows[request], self.relief.suspend, for_, reason)
            case Expire(request):
                self._endings.guarded(self._rows[request], self._endings.expire)
            case Prefill(parts):
                self._computing.prefill(parts)
            case Store(request, shared):
                row = self._rows[request]
                self._endings.guarded(row, self._computing.store, shared)
            case Decode(lane):
                self.cache.write_behind()
                self._computing.decode(cast(Lane, lane))  # they come from `submit`
        return True

    def _name_in_cold(self, model: LoadedModel, tenant: str) -> None:
        """Have the files of the cold tier say which model they are of."""
        if self._cold is not None:
            namespace = namespace_digest(model.identity, tenant=tenant)
            self._cold.models[namespace] = model.name

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

    def _computed(self, request: RequestId) -> Tokens:
        row = self._rows[request]
        return row.lane.computed(row)

    def _kv_bytes(self, row: Row, known: int) -> int:
        own = row.lane.kv_bytes(len(row.prompt) - known + row.max_tokens, known)
        return own + row.lane.draft_bytes(row)

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
