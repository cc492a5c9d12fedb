"""An engine loop whose lane is a cost model: the real scheduler, prompt cache, ledger and memory of
rows, on a clock that moves by what each turn would take.

It answers the scheduler's work as `EngineLoop` does. What it leaves out: the pressure of the real
process's memory, grammars and text, and that some kernels read a bounded number of shared spans.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Concatenate, NamedTuple, ParamSpec

from bench.simulate_cold import SimulatedStore, TimedRestoring
from bench.simulate_costs import Costs
from bench.simulate_lane import SimulatedLane
from bench.simulate_rows import SimulatedRow
from bench.simulate_timeline import Timeline
from mlx_swarm.broker.cache.ledger import Ledger, Purpose
from mlx_swarm.broker.cache.prefix_hash import Tokens
from mlx_swarm.broker.cache.prompt_cache import PromptCache
from mlx_swarm.broker.cache.restores import Restoration
from mlx_swarm.broker.cache.ssd.store import QUEUE_BYTES
from mlx_swarm.broker.engine.endings import too_late
from mlx_swarm.broker.engine.fairness import Party
from mlx_swarm.broker.engine.loop import IDLE_SECONDS, LOOK_SECONDS, PREFILL_CHUNK
from mlx_swarm.broker.engine.memory import RowMemory
from mlx_swarm.broker.engine.pace import Pace
from mlx_swarm.broker.engine.row import Row
from mlx_swarm.broker.engine.scheduler import Scheduler
from mlx_swarm.broker.engine.submission import MAX_QUEUE
from mlx_swarm.broker.engine.work import Admit, Decode, Expire, Hold, Part, Prefill, Store, Wait
from mlx_swarm.broker.errors import QueueFull, SwarmError
from mlx_swarm.broker.request import RequestId

P = ParamSpec("P")
Ended = Callable[[SimulatedRow, SwarmError | None], None]
"""Hears of a row that is over, and of what went wrong."""


class Sizes(NamedTuple):
    """The engine's settings, in bytes as for a broker: `ram` is for the prompt cache, `memory` for
    everything (0 for as much as the machine needs), `cold` for the tier below (0 for none).
    """

    ram: int
    memory: int = 0
    cold: int = 0
    max_rows: int = 32
    chunk: int | None = None
    max_queue: int = MAX_QUEUE


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
        on_gap: Callable[[float, int], None] = lambda seconds, rows: None,
    ) -> None:
        unit = costs.bytes_per_token
        weights = costs.weight_bytes // unit
        ram = sizes.ram // unit
        self.rows: dict[RequestId, SimulatedRow] = {}
        self.turns: Counter[str] = Counter()
        self._costs = costs
        self._sizes = sizes
        self._timeline = timeline
        self._on_ended = on_ended
        self._on_gap = on_gap
        self.ledger = Ledger(sizes.memory // unit if sizes.memory else 1 << 62)
        self.ledger.charge(Purpose.WEIGHTS, weights)
        self.store = self._make_store(sizes.cold // unit) if sizes.cold else None
        self.cache = PromptCache(ram, cold=self.store, ledger=self.ledger, clock=timeline)
        self.lane = SimulatedLane(self.cache, costs)
        self._pace = Pace(PREFILL_CHUNK, sizes.chunk, costs.least_chunk)
        self._memory = RowMemory(self.ledger, self.cache, self._kv_tokens)
        self._restoring = TimedRestoring(self._restored, self._begin_reading)
        self.scheduler = Scheduler(
            self.cache.peek_prefix_len,
            max_rows=sizes.max_rows,
            clock=timeline,
            chunk=lambda decoding: self._pace.chunk(decoding=decoding),
            has_memory=lambda request: self._memory.is_granted(self.rows[request]),
            computed=self._computed,
        )
        self.cache.on_written = self.scheduler.memory_changed
        self._last_tokens = 0.0
        self._looked_at = 0.0

    def submit(self, row: SimulatedRow) -> None:
        """Queue a request. Raises what the engine refuses it with: `QueueFull`, `OutOfMemory`."""
        if self.is_full:
            raise QueueFull(f"{len(self.rows):,} requests are open")
        self._memory.require_possible(row)
        request = row.request
        self.rows[row.id] = row
        self.scheduler.submit(
            row.id,
            row.prompt,
            row.namespace if self.cache.max_bytes else None,
            row.boundaries,
            max_tokens=row.max_tokens,
            party=Party(request.tenant, request.swarm, request.agent),
            priority=request.priority,
            deadline=row.deadline,
        )

    @property
    def is_full(self) -> bool:
        """Whether no more requests may wait."""
        return len(self.rows) >= self._sizes.max_rows + self._sizes.max_queue

    @property
    def promised(self) -> int:
        """What the ledger has promised or sees in use, but for readings: those it is only told of,
        by the real cold tier too.
        """
        return self.ledger.total - self.ledger.used(Purpose.RESTORES)

    def cancel(self, request: RequestId) -> None:
        """End a request in whatever state it is; what it computed is kept."""
        row = self.rows.get(request)
        if row is not None:
            self._end(row)

    def turn(self) -> bool:
        """Do the next piece of work; False if there is none before something else happens."""
        work = self.scheduler.next()
        self.turns[type(work).__name__] += 1
        match work:
            case None:
                return self._rest()
            case Admit(request):
                row = self.rows[request]
                self._guarded(row, self._admit)
            case Wait() | Hold():
                pass
            case Expire(request):
                row = self.rows[request]
                self.lane.keep(row)
                self._fail(row, too_late(row, self._timeline.now))
            case Prefill(parts):
                self._prefill(parts)
            case Store(request, shared):
                self._store(self.rows[request], shared)
            case Decode():
                self._decode()
        self._timeline.spend(self._costs.turn + self.lane.take_copying())
        return True

    def check_integrity(self) -> None:
        """Assert that scheduler, lane, cache and ledger agree with the open requests."""
        self.scheduler.check_integrity()
        self.cache.check_integrity()
        self.lane.check_integrity()
        self.ledger.check_integrity()
        if self.store is not None:
            self.store.check_integrity()
        promised = sum(row.memory.remaining for row in self.rows.values() if row.memory)
        assert self.ledger.used(Purpose.TAILS) == promised
        leased = [row for row in self.rows.values() if row.lease is not None]
        assert self.cache.statistics().leases == len(leased)
        assert self.promised <= self.ledger.limit

    def check_idle(self) -> None:
        """Assert that nothing is left of any request."""
        self.check_integrity()
        assert not self.rows
        assert not self.lane.rows
        assert self.ledger.used(Purpose.TAILS) == self.ledger.used(Purpose.RESTORES) == 0
        assert self.cache.statistics().leases == 0

    def _make_store(self, max_tokens: int) -> SimulatedStore:
        return SimulatedStore(
            max_tokens,
            timeline=self._timeline,
            ledger=self.ledger,
            seconds_for=lambda tokens: self._seconds(tokens, self._costs.write_rate),
            queue_tokens=QUEUE_BYTES // self._costs.bytes_per_token,
        )

    def _rest(self) -> bool:
        if self.cache.write_behind():
            return True
        if self._timeline.now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = self._timeline.now
            self.cache.demote_idle(IDLE_SECONDS)
        return False

    def _admit(self, row: SimulatedRow) -> None:
        row.admitted = self._timeline.now
        self._memory.require(row)
        if self.store is None or not self._restores(row):
            self._open(row)

    def _restores(self, row: SimulatedRow) -> bool:
        """Let a row wait for the cold tier, if that is to serve it."""
        if self._restoring.is_busy:
            if not self.cache.plan(row.prompt, row.namespace).cold_tokens:
                return False
            self.scheduler.restoring(row.id)
            self._restoring.wait(row)
            return True
        restoration = self.cache.restoration(row.prompt, row.namespace)
        if restoration is None:
            return False
        self.scheduler.restoring(row.id)
        self._restoring.begin(restoration, row)
        return True

    def _begin_reading(self, restoration: Restoration, row: Row) -> None:
        assert self.store is not None
        match = restoration.match
        self.store.begin(match, restoration.tokens, row.namespace)
        seconds = self._costs.read_seconds + self._seconds(match.bytes, self._costs.read_rate)

        def end() -> None:
            self.cache.note_restore(match.bytes, seconds)
            self._restoring.end()

        self._timeline.at(self._timeline.now + seconds, end)

    def _restored(self, restoration: Restoration, row: Row, later: Sequence[Row]) -> None:
        for each in reversed(later):
            if self.rows.get(each.id) is each:
                self.scheduler.restored(each.id)
        mine = self.rows.get(row.id)
        if mine is not None:
            self._guarded(mine, self._open, restoration)
        elif (lease := self.cache.lease(row.prompt, row.namespace, restoration)) is not None:
            lease.release()

    def _open(self, row: SimulatedRow, restoration: Restoration | None = None) -> None:
        self.lane.open(row, restoration)
        points = self.cache.put_points(row.prompt, row.namespace, row.boundaries)
        if self.scheduler.admitted(row.id, row.position, points):
            self._join(row)

    def _prefill(self, parts: Sequence[Part]) -> None:
        together: list[tuple[SimulatedRow, int]] = []
        for request, start, stop in parts:
            row = self.rows[request]
            if self.lane.can_seat(row):
                self._guarded(row, self._seat)
            if self.lane.holds(row):
                together.append((row, stop))
            elif row.id in self.rows:
                self._computed_in(stop - start, self.lane.prefill(row, stop))
                self._prefilled(row)
        if together:
            tokens = sum(stop - row.position for row, stop in together)
            self._computed_in(tokens, self.lane.prefill_together(together))
            for row, _ in together:
                self._guarded(row, self._prefilled)

    def _computed_in(self, tokens: int, seconds: float) -> None:
        self._timeline.spend(seconds)
        self._pace.note_prefill(tokens, seconds)
        self.cache.note_prefill(tokens, seconds)

    def _prefilled(self, row: SimulatedRow) -> None:
        if self.scheduler.prefilled(row.id, row.position, lasting=self.lane.holds(row)):
            self._join(row)

    def _store(self, row: SimulatedRow, shared: int) -> None:
        kept = self.lane.store(row, shared)
        if kept and self.lane.holds(row):
            self._settle(row)
        if self.scheduler.stored(row.id, kept=kept):
            self._join(row)

    def _seat(self, row: SimulatedRow) -> None:
        self.lane.seat(row)
        self._settle(row)

    def _settle(self, row: SimulatedRow) -> None:
        self._memory.settle(row, self.lane.reads(row))

    def _join(self, row: SimulatedRow) -> None:
        self.lane.join(row)
        self._settle(row)
        row.joined = self._timeline.now

    def _decode(self) -> None:
        self.cache.write_behind()
        step = self.lane.step()
        self._timeline.spend(step.seconds)
        self._pace.note_step(step.seconds)
        now = self._timeline.now
        self._on_gap(now - self._last_tokens, step.going)
        self._last_tokens = now
        for row in step.begun:
            row.first_token = now
        for row in step.ended:
            self._end(row)

    def _computed(self, request: RequestId) -> Tokens:
        return self.lane.computed(self.rows[request])

    def _kv_tokens(self, row: Row, known: int) -> int:
        return len(row.prompt) - known + row.max_tokens

    def _seconds(self, tokens: int, rate: float) -> float:
        return tokens * self._costs.bytes_per_token / rate

    def _guarded(
        self,
        row: SimulatedRow,
        action: Callable[Concatenate[SimulatedRow, P], None],
        *args: P.args,
        **named: P.kwargs,
    ) -> None:
        """Do something for a row; what it is refused ends that row alone."""
        try:
            action(row, *args, **named)
        except SwarmError as error:
            self._fail(row, error)

    def _end(self, row: SimulatedRow) -> None:
        self.lane.keep(row)
        self._retire(row, None)

    def _fail(self, row: SimulatedRow, error: SwarmError) -> None:
        self.lane.discard(row)
        self._retire(row, error)

    def _retire(self, row: SimulatedRow, error: SwarmError | None) -> None:
        del self.rows[row.id]
        self._memory.release(row)
        self.scheduler.ended(row.id)
        self._on_ended(row, error)
