"""The batch lane without a model: rows, leases and puts are real, computing takes its costs.

It does for the prompt cache and the ledger what `BatchLane` does with a model whose KV can be cut
anywhere: the same leases, exchanged at the same moments, and the same puts.
"""

from collections.abc import Callable, Sequence

import numpy as np

from bench.simulate_costs import Costs
from bench.simulate_kv import CountedRow
from bench.simulate_rows import Reading, SimulatedRow, exchange
from bench.simulate_timeline import Timeline
from mlx_swarm.broker.cache.lease import PromptLease
from mlx_swarm.broker.cache.prefix_hash import Tokens
from mlx_swarm.broker.cache.prompt_cache import PromptCache
from mlx_swarm.broker.cache.restores import Restoration
from mlx_swarm.broker.engine.ahead import pieces
from mlx_swarm.broker.engine.decode_batch import PrefillLimits
from mlx_swarm.broker.engine.pace import Pace
from mlx_swarm.broker.engine.row import RowToken
from mlx_swarm.broker.engine.sharing import is_worth_a_span
from mlx_swarm.broker.errors import CacheError

Gap = Callable[[float, int], None]
"""Hears of the seconds since the last tokens of so many rows that got another one."""


class SimulatedLane:
    """A `Lane`: rows from their lease to their last token. What computes lets time pass."""

    name = "simulated"
    spans = ()
    exact_stops = False
    donates = True
    preempts = True

    def __init__(
        self,
        cache: PromptCache,
        costs: Costs,
        max_rows: int,
        pace: Pace,
        timeline: Timeline,
        on_gap: Gap,
    ) -> None:
        self.max_rows = max_rows
        self.pace = pace
        self._cache = cache
        self._costs = costs
        self._timeline = timeline
        self._on_gap = on_gap
        self._last_tokens = 0.0
        self._limits = PrefillLimits(costs.rest, costs.rest_keys)
        self._namespaces: set[str] = set()
        self._alone: set[SimulatedRow] = set()
        self._seated: dict[SimulatedRow, None] = {}
        self._joining: list[SimulatedRow] = []
        self._running: dict[SimulatedRow, None] = {}
        self._steps = 0
        self._reading = Reading()
        self._copied = 0

    def chunk(self, decoding: bool) -> int:
        """Prompt tokens to compute at once; with `decoding`, between two steps."""
        return self.pace.chunk(decoding=decoding)

    @property
    def running(self) -> list[SimulatedRow]:
        """The rows that decode."""
        return [*self._running, *self._joining]

    @property
    def rows(self) -> list[SimulatedRow]:
        """The rows that were taken into the batch."""
        return list(self._seated)

    def kv_bytes(self, tokens: int, shared: int) -> int:
        """A byte stands for a token."""
        return tokens

    def draft_bytes(self, row: SimulatedRow) -> int:
        """Nobody drafts."""
        return 0

    def put_points(self, start: int, end: int) -> tuple[int, ...]:
        """None beside those of the cache."""
        return ()

    def open(self, row: SimulatedRow, restoration: Restoration | None = None) -> None:
        """Give a row what the cache has for it."""
        self._namespaces.add(row.namespace)
        lease = self._cache.lease(row.sequence, row.namespace, restoration)
        row.take(lease)
        row.reach = row.position
        if not self.can_seat(row):
            self._alone.add(row)

    def outputs(self, row: SimulatedRow) -> int:
        """How many tokens of its answer a row has."""
        return row.given + (self._steps - row.first_step if row in self._running else 0)

    def can_seat(self, row: SimulatedRow) -> bool:
        """Whether the rest of its prompt is short, and what was computed alone is stored."""
        if row in self._seated:
            return False
        rest = len(row.sequence) - 1 - row.position
        short = self._limits.take(rest, rest * row.position)
        return short and (row not in self._alone or row.stored == row.position)

    def holds(self, row: SimulatedRow) -> bool:
        """Whether the row was taken into the batch."""
        return row in self._seated

    def seat(self, row: SimulatedRow) -> None:
        """Take a row into the batch; its lease may change."""
        if row in self._alone:
            self._alone.discard(row)
            leased = row.lease.length if row.lease is not None else 0
            exchange(self._cache, row, row.position, lambda lease: lease.length > leased)
        row.reach = row.lease.length if row.lease is not None else 0
        self._make_private(row)
        self._seated[row] = None

    def reads(self, row: SimulatedRow) -> int:
        """How many tokens a row reads where the cache holds them."""
        if row in self._seated:
            return row.reach
        return row.lease.length if row.lease is not None else 0

    def computed(self, row: SimulatedRow) -> Tokens:
        """The tokens of a row that could be stored now."""
        if row in self._running:
            answer = np.array(row.answer[: self.outputs(row)], row.prompt.dtype)
            return np.concatenate([row.prompt, answer])
        return row.sequence[: row.position]

    def prefill(self, row: SimulatedRow, stop: int) -> None:
        """Compute a prompt outside the batch up to `stop`, in calls that end at whole tiles."""
        tiles = pieces(row.position, stop)
        seconds = sum(self._costs.alone.seconds(b - a, _keys(a, b)) for a, b in tiles)
        self._spend(stop - row.position, seconds)
        row.advance(stop)

    def prefill_together(self, parts: Sequence[tuple[SimulatedRow, int]]) -> None:
        """Compute the prompts of rows in the batch, each up to a position."""
        tokens = sum(stop - row.position for row, stop in parts)
        keys = sum(_keys(row.position, stop) for row, stop in parts)
        self._spend(tokens, self._costs.together.seconds(tokens, keys))
        for row, stop in parts:
            row.advance(stop)

    def store(self, row: SimulatedRow, shared: int) -> bool:
        """Put what a row has computed; in the batch it reads the first `shared` tokens of that
        where they are stored from then on, if they are many.
        """
        if not self._put(row):
            return False
        row.stored = row.position
        if row in self._seated:
            reach = row.reach

            def is_longer(lease: PromptLease) -> bool:
                return is_worth_a_span(lease.length - reach, alone=True)

            runs, outputs = row in self._running, self.outputs(row)
            if runs:
                self._reading.leave(row, outputs)
            if exchange(self._cache, row, shared, is_longer):
                assert row.lease is not None
                row.reach = row.lease.length
            if runs:
                self._reading.join(row, outputs)
        return True

    def join(self, row: SimulatedRow) -> None:
        """Let a row decode from the next step on that begins."""
        if row not in self._seated:
            self.seat(row)
        self._joining.append(row)

    def step(self) -> list[RowToken]:
        """One token for each row; those that joined while others run are one step behind."""
        if not self._running:
            self._start()
        rows = list(self._running)
        seconds = self._costs.step.seconds(len(rows), *self._reading.totals)
        self._timeline.spend(seconds)
        self.pace.note_step(seconds)
        self._steps += 1
        self._reading.own += len(rows)
        received, going = [], 0
        for row in rows:
            at = self.outputs(row)
            row.computed += at == 1
            going += at > row.given + 1
            reason = "length" if at == len(row.answer) else None
            received.append(RowToken(row, row.answer[at - 1], reason))
        self._on_gap(self._timeline.now - self._last_tokens, going)
        self._last_tokens = self._timeline.now
        self._start()
        return received

    def keep(self, row: SimulatedRow) -> int:
        """End a row wherever it is and put what it computed; how many tokens were kept."""
        is_here = row in self._seated or row in self._alone
        kept = len(self.computed(row)) if is_here and self._put(row) else 0
        self.discard(row)
        return kept

    def discard(self, row: SimulatedRow) -> None:
        """End a row wherever it is."""
        self._alone.discard(row)
        self._seated.pop(row, None)
        if row in self._joining:
            self._joining.remove(row)
        if row in self._running:
            self._reading.leave(row, self.outputs(row))
            del self._running[row]
        if row.lease is not None:
            row.lease.release()
            row.lease = None

    def take_copying(self) -> float:
        """The seconds for what was stored since this was asked the last time."""
        tokens, self._copied = self._copied, 0
        return self._costs.store * tokens

    def check_integrity(self) -> None:
        """Assert that what is read adds up, and that nothing is kept of who left."""
        assert {*self._running, *self._joining} <= self._seated.keys()
        assert not self._alone & self._seated.keys()
        for row in self._seated:
            assert row.reach <= (row.lease.length if row.lease is not None else 0)
            assert row.reach <= row.position < len(row.sequence)
            assert self.outputs(row) == len(row.output)
        own = sum(len(row.prompt) + self.outputs(row) - row.reach for row in self._running)
        read = sum(row.reach for row in self._running)
        assert (self._reading.own, self._reading.read) == (own, read)
        assert self._running or self._reading.totals == (0, 0, 0)

    def _start(self) -> None:
        """Let those who joined take part in the step that begins now."""
        for row in self._joining:
            row.first_step = self._steps
            self._running[row] = None
            self._reading.join(row, row.given)
        self._joining.clear()

    def _spend(self, tokens: int, seconds: float) -> None:
        self._timeline.spend(seconds)
        self.pace.note_prefill(tokens, seconds)
        self._cache.note_prefill(tokens, seconds, self._namespaces)

    def _put(self, row: SimulatedRow) -> bool:
        tokens = self.computed(row)
        if not len(tokens):
            return False
        try:
            stored = self._cache.put(tokens, CountedRow(len(tokens)), row.namespace, row.lease)
        except CacheError:
            return False
        self._copied += stored.new_tokens
        return stored.stored

    def _make_private(self, row: SimulatedRow) -> None:
        """Copy the last piece that a row reads, where it is short and nobody else reads it."""
        lease = row.lease
        if lease is None or self._cache.readers(lease) > 1:
            return
        last = lease.ranges[-1]
        if is_worth_a_span(len(last), alone=True) or len(last) > self._cache.free_bytes:
            return
        row.reach = last.start
        if not row.reach:
            lease.release()
            row.lease = None
            return
        read = {each.extent for each in lease.ranges[:-1]}

        def keeps_all(lease: PromptLease) -> bool:
            return lease.length == row.reach and read <= {each.extent for each in lease.ranges}

        exchange(self._cache, row, row.reach, keeps_all)


def _keys(start: int, stop: int) -> int:
    """How many earlier tokens the tokens [start, stop) attend to, all together."""
    return (stop - start) * (start + stop) // 2
