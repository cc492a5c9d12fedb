"""The scheduler's policy over whole runs of the simulator: with the real cache and the real ledger,
and time that passes.
"""

from collections import Counter

import msgspec
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from bench.simulate_costs import PROFILES
from bench.simulate_engine import SimulatedEngine, Sizes
from bench.simulate_rows import SimulatedRow
from bench.simulate_run import Outcome, play
from bench.simulate_workload import Session, Turn
from mlx_swarm.broker.engine.fairness import AGING_SECONDS, QUANTUM
from mlx_swarm.broker.engine.preemption import LOOKS, SLICE
from mlx_swarm.broker.request import RequestId
from mlx_swarm.broker.trace.events import Admitted, Event, Failed, Finished, Preempted, Waiting

COSTS = PROFILES["cpu-small"]
UNIT = COSTS.bytes_per_token
WEIGHTS = COSTS.weight_bytes // UNIT
SHARED = np.arange(1, 101, dtype=np.uint32)

# A whole run takes too long for many tries at a shorter one.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
SLOW = settings(
    max_examples=25,
    deadline=None,
    phases=PHASES,
    suppress_health_check=[HealthCheck.too_slow],
)


def session(
    number: int,
    turns: list[Turn],
    *,
    name: str = "",
    at: float = 0.0,
    shared: int = 0,
    tenant: str = "",
    priority: int = 0,
    deadline: float | None = None,
) -> Session:
    """A session that shares the first tokens of its prompt with others."""
    return Session(
        name=name or f"agent-{number}",
        at=at,
        opening=lambda: SHARED[:shared],
        turns=turns,
        seed=(number,),
        boundary=shared,
        tenant=tenant,
        priority=priority,
        deadline=deadline,
    )


TURNS = st.lists(
    st.builds(Turn, st.integers(1, 120), st.integers(1, 20), st.sampled_from([0.0, 0.5, 5.0])),
    min_size=1,
    max_size=3,
)


@st.composite
def crowds(draw: st.DrawFn) -> list[Session]:
    """Sessions that differ in everything."""
    return [
        session(
            number,
            draw(TURNS),
            at=draw(st.sampled_from([0.0, 0.0, 0.2, 3.0])),
            shared=draw(st.sampled_from([0, 40, 100])),
            tenant=draw(st.sampled_from(["", "one"])),
            priority=draw(st.integers(-2, 2)),
            deadline=draw(st.sampled_from([None, None, None, 2.0])),
        )
        for number in range(draw(st.integers(1, 14)))
    ]


SIZES = st.builds(
    lambda ram, cold, memory, *others: Sizes(
        ram * UNIT, (WEIGHTS + memory) * UNIT if memory else 0, cold * UNIT, *others
    ),
    st.sampled_from([0, 300, 1000, 100_000]),
    st.sampled_from([0, 0, 600, 100_000]),
    st.sampled_from([0, 700, 2000]),
    st.integers(1, 5),
    st.sampled_from([None, 16, 64]),
    st.sampled_from([2, 1024]),
    st.sampled_from([24, 96, SLICE]),
)


class GivenWay:
    """Asserts that nobody is back in a row before those have been for whom it was taken."""

    def __init__(self) -> None:
        self._owed: dict[str, set[str]] = {}

    def __call__(self, event: Event) -> None:
        match event:
            case Preempted(request=request, by=by):
                self._owed.setdefault(request, set()).add(by)
            case Admitted(request=request):
                assert not self._owed.get(request), (request, self._owed)
                self._has_come(request)
            case Waiting(request=request) | Failed(request=request) | Finished(request=request):
                self._has_come(request)
            case _:
                pass

    def _has_come(self, request: str) -> None:
        for others in self._owed.values():
            others.discard(request)


@given(crowds(), SIZES)
@SLOW
def test_everybody_is_served_within_memory_and_nothing_is_left(
    sessions: list[Session], sizes: Sizes
) -> None:
    seen, most = (
        0,
        100 * sum(turn.ask + turn.answer for session in sessions for turn in session.turns),
    )

    def look(engine: SimulatedEngine) -> None:
        nonlocal seen
        seen += 1
        if engine.recorder.heard is None:
            engine.recorder.heard = GivenWay()
        # No piece of work is done for nothing, so there is an end to it.
        assert seen < most + 40 * engine.turns["Preempt"]
        assert engine.ledger.total <= engine.ledger.limit
        if seen % 7 == 0:
            engine.check_integrity()

    outcome = play(sessions, COSTS, sizes, look)
    outcome.engine.check_idle()
    conserved(outcome)
    usage = outcome.engine.usage
    assert usage.recomputed_tokens == sum(turn.recomputed for turn in outcome.turns)
    assert usage.prefilled_tokens == sum(turn.computed for turn in outcome.turns)
    lost = {turn.session for turn in outcome.turns if turn.error}
    assert {turn.error for turn in outcome.turns} <= {"", "DeadlineExceeded", "OutOfMemory"}
    assert all(sessions[each].deadline or sizes.memory for each in lost)
    served = Counter(turn.session for turn in outcome.turns)
    assert all(served[at] == len(each.turns) for at, each in enumerate(sessions) if at not in lost)


def conserved(outcome: Outcome) -> None:
    """Assert that every prompt token came from one place, and that answers are whole."""
    for turn in outcome.turns:
        answer = outcome.sessions[turn.session].turns[turn.turn].answer
        assert turn.ram + turn.cold + turn.computed == turn.reached <= turn.prompt
        assert turn.output <= answer
        if not turn.error:
            assert (turn.reached, turn.output) == (turn.prompt, answer)


@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.integers(4, 12), st.integers(0, 2)), min_size=1, max_size=4
    ),
    st.integers(0, 2),
    st.integers(1, 3),
    st.sampled_from([200, 512, 100_000]),
    st.sampled_from([16, SLICE]),
)
@settings(SLOW, max_examples=8)
def test_whoever_else_arrives_nobody_waits_for_ever(
    jobs: list[tuple[int, int, int]], below: int, rows: int, ram: int, slice_tokens: int
) -> None:
    seconds = (below + 3) * AGING_SECONDS
    slow = msgspec.structs.replace(COSTS.step, step=0.2)
    # More than can be served most of the time, and all of no less priority than the victim's.
    others = [
        session(number, [Turn(ask, answer)], at=number * 0.25, priority=priority)
        for number in range(int(4 * seconds))
        for ask, answer, priority in [jobs[number % len(jobs)]]
    ]
    victim = session(len(others), [Turn(50, 4)], at=1.0, priority=-below)
    sizes = Sizes(ram * UNIT, max_rows=rows, max_queue=1 << 30, slice_tokens=slice_tokens)
    outcome = play([*others, victim], msgspec.structs.replace(COSTS, step=slow), sizes)
    (mine,) = (turn for turn in outcome.turns if turn.session == len(others))
    longest = max(turn.ended - (turn.admitted or 0.0) for turn in outcome.turns)
    levels = below + max(priority for _, _, priority in jobs)
    # Every time that it runs it gets a slice ahead; who came before it is older.
    visits = (1 + (50 + 4) // slice_tokens) * (1 + sum(each.at <= 1.0 for each in others))
    assert mine.ended - mine.asked <= visits * ((levels + 2) * AGING_SECONDS + 2 * longest)


@given(
    st.lists(st.builds(Turn, st.integers(1, 200), st.integers(1, 60)), min_size=1, max_size=3),
    st.lists(st.builds(Turn, st.integers(1, 200), st.integers(1, 60)), min_size=1, max_size=3),
    st.integers(1, 4),
)
@SLOW
def test_two_busy_agents_attain_the_same_but_for_what_their_rows_compute(
    first: list[Turn], second: list[Turn], rows: int
) -> None:
    jobs = {"a": first, "b": second}
    sessions = [
        session(2 * at + each, [its[at % len(its)]], name=name)
        for at in range(10)
        for each, (name, its) in enumerate(jobs.items())
    ]
    largest = max(turn.ask + turn.answer for turn in (*first, *second))
    everybody: dict[RequestId, SimulatedRow] = {}
    compared = 0

    def look(engine: SimulatedEngine) -> None:
        nonlocal compared
        everybody.update(engine.rows)
        attained, waiting = Counter[str](), Counter[str]()
        for name, row in everybody.items():
            is_over = name not in engine.rows
            # The first step computes the last prompt token, and is counted once.
            attained[row.request.agent] += row.computed + max(len(row.output) - 1, 0)
            waiting[row.request.agent] += row.admitted is None and not is_over
        if all(waiting[name] for name in jobs):
            compared += 1
            # Once in a while a turn goes by age, not by service.
            assert abs(attained["a"] - attained["b"]) <= (rows + 1) * largest

    outcome = play(sessions, COSTS, Sizes(0, max_rows=rows, chunk=64), look)
    conserved(outcome)
    assert compared


LONG = st.lists(
    st.builds(Turn, st.integers(1, 300), st.sampled_from([1, 60, 400])), min_size=1, max_size=3
)


@given(LONG, LONG, st.integers(1, 3))
@settings(SLOW, max_examples=15)
def test_two_busy_agents_differ_by_slices_however_long_their_requests_are(
    first: list[Turn], second: list[Turn], rows: int
) -> None:
    """The bound that `fairness` states, for requests that the cache keeps."""
    slice_tokens, chunk = 128, 64
    jobs = {"a": first, "b": second}
    sessions = [
        session(2 * at + each, [its[at % len(its)]], name=name)
        for at in range(8)
        for each, (name, its) in enumerate(jobs.items())
    ]
    bound = (rows + 1) * (slice_tokens + QUANTUM + chunk + slice_tokens // LOOKS + 1)
    everybody: dict[RequestId, SimulatedRow] = {}

    def look(engine: SimulatedEngine) -> None:
        everybody.update(engine.rows)
        attained, waiting = Counter[str](), Counter[str]()
        for row in everybody.values():
            attained[row.request.agent] += row.computed + max(len(row.output) - 1, 0)
            waiting[row.request.agent] += row.id in engine.rows and row.admitted is None
        if all(waiting[name] for name in jobs):
            assert abs(attained["a"] - attained["b"]) <= bound

    sizes = Sizes(100_000 * UNIT, max_rows=rows, chunk=chunk, slice_tokens=slice_tokens)
    outcome = play(sessions, COSTS, sizes, look)
    conserved(outcome)
    assert not any(turn.error for turn in outcome.turns)
    assert not outcome.engine.usage.recomputed_tokens
