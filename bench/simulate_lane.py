"""The batch lane without a model: rows, leases and puts are real, computing takes its costs.

It does for the prompt cache and the ledger what `BatchLane` does with a model whose KV can be cut
anywhere: the same leases, exchanged at the same moments, and the same puts.
"""

import heapq
from collections.abc import Callable, Sequence
from itertools import count, pairwise
from typing import NamedTuple

import numpy as np

from bench.simulate_costs import Costs
from bench.simulate_kv import CountedRow
from bench.simulate_rows import Reading, SimulatedRow
from mlx_swarm.broker.cache.lease import PromptLease
from mlx_swarm.broker.cache.prefix_hash import Tokens
from mlx_swarm.broker.cache.prompt_cache import PromptCache
from mlx_swarm.broker.cache.restores import Restoration
from mlx_swarm.broker.engine.ahead import TILE_ALONE
from mlx_swarm.broker.engine.decode_batch import PrefillLimits
from mlx_swarm.broker.engine.row import Row
from mlx_swarm.broker.engine.sharing import is_worth_a_span
from mlx_swarm.broker.errors import CacheError


class Step(NamedTuple):
    """What a decode step did: who got a first token, who the last one, how many another one."""

    seconds: float
    begun: list[SimulatedRow]
    ended: list[SimulatedRow]
    going: int


class SimulatedLane:
    """Rows from their lease to their last token. What computes returns the seconds it takes."""

    def __init__(self, cache: PromptCache, costs: Costs) -> None:
        self._cache = cache
        self._costs = costs
        self._limits = PrefillLimits(costs.rest, costs.rest_keys)
        self._alone: set[Row] = set()
        self._seated: dict[SimulatedRow, None] = {}
        self._joining: list[SimulatedRow] = []
        self._begun: list[SimulatedRow] = []
        self._running: dict[SimulatedRow, None] = {}
        self._ends: list[tuple[int, int, SimulatedRow]] = []
        self._numbers = count()
        self._steps = 0
        self._reading = Reading()
        self._copied = 0

    @property
    def decoding(self) -> int:
        """How many rows decode."""
        return len(self._running) + len(self._joining)

    @property
    def rows(self) -> list[SimulatedRow]:
        """The rows that were taken into the batch."""
        return list(self._seated)

    def open(self, row: SimulatedRow, restoration: Restoration | None = None) -> None:
        """Give a row what the cache has for it."""
        row.lease = self._cache.lease(row.prompt, row.namespace, restoration)
        if row.lease is not None:
            row.position = row.stored = row.reach = row.lease.length
            row.ram_tokens, row.cold_tokens = row.lease.ram_tokens, row.lease.cold_tokens
        if not self.can_seat(row):
            self._alone.add(row)

    def outputs(self, row: SimulatedRow) -> int:
        """How many tokens of its answer a row has."""
        return self._steps - row.first_step if row in self._running else 0

    def can_seat(self, row: SimulatedRow) -> bool:
        """Whether the rest of its prompt is short, and what was computed alone is stored."""
        if row in self._seated:
            return False
        rest = len(row.prompt) - 1 - row.position
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
            self._exchange(row, row.position, lambda lease: lease.length > leased)
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
            return np.concatenate([row.prompt, row.answer[: self.outputs(row)]])
        return row.prompt[: row.position]

    def prefill(self, row: SimulatedRow, stop: int) -> float:
        """Compute a prompt outside the batch up to `stop`, in calls that end at whole tiles."""
        cuts = range((row.position // TILE_ALONE + 1) * TILE_ALONE, stop, TILE_ALONE)
        pieces = pairwise([row.position, *cuts, stop])
        seconds = sum(self._costs.alone.seconds(b - a, _keys(a, b)) for a, b in pieces)
        self._advance(row, stop)
        return seconds

    def prefill_together(self, parts: Sequence[tuple[SimulatedRow, int]]) -> float:
        """Compute the prompts of rows in the batch, each up to a position."""
        tokens = sum(stop - row.position for row, stop in parts)
        keys = sum(_keys(row.position, stop) for row, stop in parts)
        for row, stop in parts:
            self._advance(row, stop)
        return self._costs.together.seconds(tokens, keys)

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
            if self._exchange(row, shared, is_longer):
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

    def step(self) -> Step:
        """One token for each row; those that joined while others run are one step behind."""
        if not self._running:
            self._start()
        begun, self._begun = self._begun, []
        rows = len(self._running)
        seconds = self._costs.step.seconds(rows, *self._reading.totals)
        self._steps += 1
        self._reading.own += rows
        for row in begun:
            row.computed += 1
        ended = []
        while self._ends and self._ends[0][0] <= self._steps:
            row = heapq.heappop(self._ends)[2]
            if row in self._running:
                ended.append(row)
        self._start()
        return Step(seconds, begun, ended, rows - len(begun))

    def keep(self, row: SimulatedRow) -> None:
        """End a row wherever it is and put what it computed."""
        if row in self._seated or row in self._alone:
            self._put(row)
        self.discard(row)

    def discard(self, row: SimulatedRow) -> None:
        """End a row wherever it is."""
        row.output = row.answer[: self.outputs(row)].tolist()
        self._alone.discard(row)
        self._seated.pop(row, None)
        if row in self._joining:
            self._joining.remove(row)
        if row in self._running:
            self._reading.leave(row, self.outputs(row))
            del self._running[row]
            self._begun = [each for each in self._begun if each is not row]
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
            assert row.reach <= row.position < len(row.prompt)
        own = sum(len(row.prompt) + self.outputs(row) - row.reach for row in self._running)
        read = sum(row.reach for row in self._running)
        assert (self._reading.own, self._reading.read) == (own, read)
        assert self._running or self._reading.totals == (0, 0, 0)

    def _start(self) -> None:
        """Let those who joined take part in the step that begins now."""
        for row in self._joining:
            row.first_step = self._steps
            self._running[row] = None
            self._begun.append(row)
            self._reading.join(row, 0)
            end = self._steps + len(row.answer)
            heapq.heappush(self._ends, (end, next(self._numbers), row))
        self._joining.clear()

    def _advance(self, row: SimulatedRow, stop: int) -> None:
        row.computed += stop - row.position
        row.position = stop

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

        self._exchange(row, row.reach, keeps_all)

    def _exchange(
        self, row: SimulatedRow, length: int, accept: Callable[[PromptLease], bool]
    ) -> bool:
        """Lease the first `length` tokens of a prompt instead of what is leased, if `accept` says
        so.
        """
        lease = self._cache.renew(row.prompt[: length + 1], row.namespace)
        if lease is None:
            return False
        accepted = accept(lease)
        unused = row.lease if accepted else lease
        if accepted:
            row.lease = lease
        if unused is not None:
            unused.release()
        return accepted


def _keys(start: int, stop: int) -> int:
    """How many earlier tokens the tokens [start, stop) attend to, all together."""
    return (stop - start) * (start + stop) // 2
