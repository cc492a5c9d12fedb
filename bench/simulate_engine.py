"""An engine loop whose lane is a cost model: the real scheduler, sessions, prompt cache, ledger and
memory of rows, on a clock that moves by what each turn would take.

The parts of `EngineLoop` do their work here as they do there. What is left out: the pressure of the
real process's memory, grammars and text, and that some kernels read a bounded number of shared
spans.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from bench.simulate_cold import SimulatedStore
from bench.simulate_costs import Costs
from bench.simulate_lane import Gap, SimulatedLane
from bench.simulate_opening import TimedOpening
from bench.simulate_rows import SimulatedRow
from bench.simulate_timeline import Timeline
from mlx_swarm.broker.cache.ledger import Ledger, Purpose
from mlx_swarm.broker.cache.prefix_hash import Tokens
from mlx_swarm.broker.cache.prompt_cache import PromptCache
from mlx_swarm.broker.cache.restores import Restoration
from mlx_swarm.broker.cache.ssd.store import QUEUE_BYTES
from mlx_swarm.broker.engine.computing import Computing
from mlx_swarm.broker.engine.endings import Endings
from mlx_swarm.broker.engine.loop import IDLE_SECONDS, LOOK_SECONDS
from mlx_swarm.broker.engine.memory import RowMemory
from mlx_swarm.broker.engine.pace import Pace
from mlx_swarm.broker.engine.preemption import SLICE
from mlx_swarm.broker.engine.relief import Relief
from mlx_swarm.broker.engine.row import Row
from mlx_swarm.broker.engine.scheduler import Scheduler
from mlx_swarm.broker.engine.served import PREFILL_CHUNK
from mlx_swarm.broker.engine.session_keeper import SessionKeeper, party_of
from mlx_swarm.broker.engine.submission import MAX_QUEUE
from mlx_swarm.broker.engine.work import Admit, Decode, Expire, Hold, Preempt, Prefill, Store, Wait
from mlx_swarm.broker.errors import QueueFull, SwarmError
from mlx_swarm.broker.request import RequestId, Usage
from mlx_swarm.broker.trace.events import Event
from mlx_swarm.broker.trace.recorder import Recorder

Ended = Callable[[SimulatedRow, SwarmError | None], None]
"""Hears of a row that is over, and of what went wrong."""


class Sizes(NamedTuple):
    """The engine's settings, in bytes as for a broker: `ram` is for the prompt cache, `memory` for
    everything (0 for as much as the machine needs), `cold` for the tier below (0 for none).
    `slice_tokens` is what a row computes before others get its place.
    """

    ram: int
    memory: int = 0
    cold: int = 0
    max_rows: int = 32
    chunk: int | None = None
    max_queue: int = MAX_QUEUE
    slice_tokens: int = SLICE


class Tally(Recorder):
    """Counts events by their names and keeps none; `heard` is told of each."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(capacity=1, clock=clock)
        self.counts: Counter[str] = Counter()
        self.heard: Callable[[Event], None] | None = None

    def emit(self, event: Event) -> None:
        self.counts[type(event).__name__] += 1
        if self.heard is not None:
            self.heard(event)


class SimulatedEngine:
    """Does what the scheduler says, on `timeline`. `on_ended` hears of each request's end,
    `on_gap` of the seconds since the last tokens of so many rows that got another one.
    """

    def __init__(
        self,
        costs: Costs,
        sizes: Sizes,
        timeline: Timeline,
        on_ended: Ended,
        on_gap: Gap = lambda seconds, rows: None,
    ) -> None:
        unit = costs.bytes_per_token
        ram = sizes.ram // unit
        self.turns: Counter[str] = Counter()
        self.recorder = Tally(timeline)
        self._open: dict[RequestId, Row] = {}
        self._costs = costs
        self._sizes = sizes
        self._timeline = timeline
        self._on_ended = on_ended
        self.ledger = Ledger(sizes.memory // unit if sizes.memory else 1 << 62)
        self.ledger.charge(Purpose.WEIGHTS, costs.weight_bytes // unit)
        self.store = self._make_store(sizes.cold // unit) if sizes.cold else None
        self.cache = PromptCache(ram, cold=self.store, ledger=self.ledger, clock=timeline)
        pace = Pace(PREFILL_CHUNK, sizes.chunk, costs.least_chunk)
        self.lane = SimulatedLane(self.cache, costs, sizes.max_rows, pace, timeline, on_gap)
        self._memory = RowMemory(self.ledger, self.cache, self._kv_tokens)
        self.sessions = SessionKeeper(
            self.cache,
            self.recorder,
            lambda: pace.rate,
            lambda: self.scheduler.memory_changed(),
        )
        self.scheduler = Scheduler(
            self.cache.peek_prefix_len,
            max_rows=sizes.max_rows,
            clock=timeline,
            has_memory=lambda request: self._relief.may_run(request),
            may_start=self.sessions.policy.may_start,
            shortage=lambda request: self._relief.shortage(request),
            promised=lambda request: self._relief.promised(request),
            computed=lambda request: self._computed(request),
            slice_tokens=sizes.slice_tokens,
        )
        self.cache.on_written = self.scheduler.memory_changed
        self._looked_at = 0.0
        self._endings = Endings(
            self._open, self.scheduler, self._memory, self.recorder, self.sessions.ended
        )
        parts = self._open, self.scheduler, self._memory, self._endings
        self._relief = Relief(*parts, self.cache, self.recorder)
        self._computing = Computing(*parts, self.recorder)
        self._opening = TimedOpening(
            *parts,
            self.cache,
            self.recorder,
            on_start=self.sessions.policy.started,
            join=self._computing.join,
            begin=self._begin_reading,
        )

    def submit(self, row: SimulatedRow) -> None:
        """Queue a request. Raises what the engine refuses it with: `QueueFull`, `OutOfMemory`."""
        if self.is_full:
            raise QueueFull(f"{len(self._open):,} requests are open")
        lane: Any = self.lane
        row.lane, row.on_end = lane, self._on_ended
        self._memory.require_possible(row)
        self._open[row.id] = row
        self.sessions.submitted(row)
        self.scheduler.submit(
            row.id,
            row.prompt,
            row.namespace if self.cache.max_bytes else None,
            row.boundaries,
            max_tokens=row.max_tokens,
            lane=row.lane,
            party=party_of(row),
            priority=row.request.priority,
            deadline=row.deadline,
        )

    @property
    def rows(self) -> dict[RequestId, SimulatedRow]:
        """The open requests."""
        return cast(dict[RequestId, SimulatedRow], self._open)

    @property
    def usage(self) -> Usage:
        """What all requests that are over have cost."""
        return self._endings.usage

    @property
    def is_full(self) -> bool:
        """Whether no more requests may wait."""
        return len(self._open) >= self._sizes.max_rows + self._sizes.max_queue

    def cancel(self, request: RequestId) -> None:
        """End a request in whatever state it is; what it computed is kept."""
        row = self._open.get(request)
        if row is not None:
            self._endings.guarded(row, self._endings.end, "cancelled")

    def turn(self) -> bool:
        """Do the next piece of work; False if there is none before something else happens."""
        if self.sessions.policy.is_due():
            self.scheduler.memory_changed()
        work = self.scheduler.next()
        self.turns[type(work).__name__] += 1
        rows, guarded = self._open, self._endings.guarded
        match work:
            case None:
                return self._rest()
            case Admit(request, not_worth_waiting):
                guarded(rows[request], self._opening.admit, not_worth_waiting)
            case Wait() | Hold():
                pass
            case Preempt(request, for_, reason):
                guarded(rows[request], self._relief.suspend, for_, reason)
            case Expire(request):
                guarded(rows[request], self._endings.expire)
            case Prefill(parts):
                self._computing.prefill(parts)
            case Store(request, shared):
                guarded(rows[request], self._computing.store, shared)
            case Decode(lane):
                self.cache.write_behind()
                self._computing.decode(cast(Any, lane))
        self._timeline.spend(self._costs.turn + self.lane.take_copying())
        return True

    def next_change(self) -> float:
        """When something may be due although nobody asks for it: a deadline, a session that need no
        longer wait.
        """
        deadline = self.scheduler.next_deadline()
        change = self.sessions.policy.next_change()
        return min(change, math.inf if deadline is None else deadline)

    def check_integrity(self) -> None:
        """Assert that scheduler, lane, cache and ledger agree with the open requests."""
        self.scheduler.check_integrity()
        self.sessions.policy.check_integrity()
        self.cache.check_integrity()
        self.lane.check_integrity()
        self.ledger.check_integrity()
        if self.store is not None:
            self.store.check_integrity()
        rows = self._open.values()
        promised = sum(row.memory.remaining for row in rows if row.memory)
        assert self.ledger.used(Purpose.TAILS) == promised
        for row in self.lane.rows:
            assert row.memory is not None
            assert row.memory.remaining == self._kv_tokens(row, self.lane.reads(row))
        assert self.cache.statistics().leases == sum(row.leases for row in rows)
        assert self.ledger.total <= self.ledger.limit

    def check_idle(self) -> None:
        """Assert that nothing is left of any request."""
        self.check_integrity()
        assert not self._open
        assert not self.lane.rows
        assert self.ledger.used(Purpose.TAILS) == self.ledger.used(Purpose.RESTORES) == 0
        assert self.cache.statistics().leases == self.sessions.statistics().waiting == 0

    def _make_store(self, max_tokens: int) -> SimulatedStore:
        return SimulatedStore(
            max_tokens,
            timeline=self._timeline,
            seconds_for=lambda tokens: self._seconds(tokens, self._costs.write_rate),
            queue_tokens=QUEUE_BYTES // self._costs.bytes_per_token,
        )

    def _rest(self) -> bool:
        if self.cache.write_behind():
            return True
        if self._timeline.now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = self._timeline.now
            self.cache.demote_idle(IDLE_SECONDS)
            self.sessions.policy.forget()
        return False

    def _begin_reading(self, reading: Restoration, row: Row, end: Callable[[], None]) -> None:
        assert self.store is not None
        match = reading.match
        self.store.begin(match, reading.tokens, row.namespace)
        seconds = self._costs.read_seconds + self._seconds(match.bytes, self._costs.read_rate)

        def done() -> None:
            self.cache.note_restore(match.bytes, seconds)
            end()

        self._timeline.at(self._timeline.now + seconds, done)

    def _computed(self, request: RequestId) -> Tokens:
        return self.lane.computed(self.rows[request])

    def _kv_tokens(self, row: Row, known: int) -> int:
        return len(row.prompt) - known + row.max_tokens

    def _seconds(self, tokens: int, rate: float) -> float:
        return tokens * self._costs.bytes_per_token / rate
