"""Sessions played to a simulated engine, and what became of every turn."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from bench.simulate_costs import Costs
from bench.simulate_engine import SimulatedEngine, Sizes
from bench.simulate_rows import SimulatedRow
from bench.simulate_timeline import Timeline
from bench.simulate_workload import Session, Turn
from mlx_swarm.broker.cache.prefix_hash import Tokens
from mlx_swarm.broker.errors import SwarmError

SAMPLES = 256
"""Samples of the tiers' sizes that are kept, at most twice as many."""


class Served(NamedTuple):
    """One turn: when it was asked, got its first token and ended, and what it cost.

    `reached` are the prompt tokens that it got to, each of them from RAM, the cold tier, or
    computed; `recomputed` tokens had to be computed once more. `error` is the kind of what went
    wrong.
    """

    session: int
    turn: int
    asked: float
    admitted: float | None
    first: float | None
    ended: float
    prompt: int
    reached: int
    ram: int
    cold: int
    computed: int
    output: int
    recomputed: int = 0
    error: str = ""


class Sample(NamedTuple):
    """The tiers at a time, in tokens, and the requests that run and wait."""

    time: float
    ram: int
    cold: int
    running: int
    waiting: int


class Outcome(NamedTuple):
    """What a run came to. `gaps` are seconds between tokens, with how many rows had each."""

    sessions: list[Session]
    turns: list[Served]
    gaps: list[tuple[float, int]]
    samples: list[Sample]
    seconds: float
    engine: SimulatedEngine


def play(
    sessions: Iterable[Session],
    costs: Costs,
    sizes: Sizes,
    after_turn: Callable[[SimulatedEngine], None] = lambda engine: None,
) -> Outcome:
    """Play all sessions to their end. `after_turn` may look at the engine after every turn."""
    return _Play(list(sessions), costs, sizes).run(after_turn)


class _Play:
    def __init__(self, sessions: list[Session], costs: Costs, sizes: Sizes) -> None:
        self._sessions = sessions
        self._timeline = Timeline()
        self._turns: list[Served] = []
        self._gaps: dict[float, int] = {}
        self._samples = _Samples()
        self._engine = SimulatedEngine(costs, sizes, self._timeline, self._ended, self._gap)
        self._open: dict[str, _Client] = {}
        self._outside: deque[SimulatedRow] = deque()
        for number, session in enumerate(sessions):
            self._timeline.at(session.at, lambda number=number: self._begin(number))  # type: ignore[misc]

    def run(self, after_turn: Callable[[SimulatedEngine], None]) -> Outcome:
        engine, timeline = self._engine, self._timeline
        while True:
            timeline.catch_up()
            if engine.turn():
                after_turn(engine)
                self._samples.look(timeline.now, engine, len(self._outside))
                continue
            if not timeline.skip(engine.next_change()):
                break
        return Outcome(
            self._sessions,
            self._turns,
            sorted(self._gaps.items()),
            self._samples.kept,
            timeline.now,
            engine,
        )

    def _begin(self, number: int) -> None:
        session = self._sessions[number]
        client = _Client(number, session)
        self._ask(client, session.at)

    def _ask(self, client: "_Client", asked: float) -> None:
        row = client.ask(asked)
        self._open[row.id] = client
        if self._outside or self._engine.is_full:
            # Who finds the queue full comes back when there is room, in the order of arrival.
            self._outside.append(row)
        else:
            self._submit(row)

    def _submit(self, row: SimulatedRow) -> None:
        try:
            self._engine.submit(row)
        except SwarmError as error:
            self._ended(row, error)

    def _ended(self, row: SimulatedRow, error: SwarmError | None) -> None:
        client, now = self._open.pop(row.id), self._timeline.now
        self._turns.append(client.served(row, now, error))
        turn = client.proceed(row, error)
        if turn is not None:
            at = now + turn.pause
            self._timeline.at(at, lambda: self._ask(client, at))
        if self._outside:
            self._timeline.at(now, self._let_in)

    def _let_in(self) -> None:
        while self._outside and not self._engine.is_full:
            self._submit(self._outside.popleft())

    def _gap(self, seconds: float, rows: int) -> None:
        if rows:
            # To the microsecond, or a long run would keep as many gaps as steps.
            key = round(seconds, 6)
            self._gaps[key] = self._gaps.get(key, 0) + rows


class _Client:
    """An agent: its transcript so far, and which turn it is at."""

    def __init__(self, number: int, session: Session) -> None:
        self._number = number
        self._session = session
        self._turn = 0
        self._draw = session.draw()
        self._transcript: Tokens = session.opening()

    def ask(self, asked: float) -> SimulatedRow:
        """The request of the present turn."""
        session, turn = self._session, self._session.turns[self._turn]
        if turn.ask:
            self._transcript = np.concatenate([self._transcript, self._draw(turn.ask)])
        request, answer = session.request((), turn), self._draw(turn.answer)
        name = f"{session.name}/{self._number}.{self._turn}"
        return SimulatedRow(name, request, self._transcript, answer, asked)

    def served(self, row: SimulatedRow, now: float, error: SwarmError | None) -> Served:
        """What became of the present turn."""
        usage = row.usage(now)
        return Served(
            session=self._number,
            turn=self._turn,
            asked=row.submitted,
            admitted=row.admitted,
            first=row.first_token,
            ended=now,
            prompt=len(row.prompt),
            reached=usage.prompt_tokens,
            ram=row.ram_tokens,
            cold=row.cold_tokens,
            computed=row.computed,
            output=len(row.output),
            recomputed=usage.recomputed_tokens,
            error="" if error is None else type(error).__name__,
        )

    def proceed(self, row: SimulatedRow, error: SwarmError | None) -> Turn | None:
        """Take the answer in; the next turn, if there is one."""
        self._turn += 1
        if error is not None or self._turn == len(self._session.turns):
            return None
        self._transcript = np.concatenate([row.prompt, np.array(row.output, np.uint32)])
        return self._session.turns[self._turn]


class _Samples:
    """Looks every so often, and half as often whenever that comes to too many samples."""

    def __init__(self) -> None:
        self.kept: list[Sample] = []
        self._every = 0.01
        self._next = 0.0

    def look(self, now: float, engine: SimulatedEngine, outside: int) -> None:
        if now < self._next:
            return
        cold = engine.store.tokens if engine.store is not None else 0
        queued = engine.scheduler.queued
        running = len(engine.rows) - queued
        self.kept.append(Sample(now, engine.cache.total_bytes, cold, running, queued + outside))
        if len(self.kept) > 2 * SAMPLES:
            del self.kept[1::2]
            self._every *= 2
        self._next = now + self._every
