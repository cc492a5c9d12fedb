"""Who gives a place to whom: by the scheduler's own work on an engine without MLX."""

from collections import Counter
from itertools import cycle, pairwise
from typing import NamedTuple

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mlx_swarm.broker.engine.fairness import QUANTUM, Account, Claim, Party, ahead_of
from mlx_swarm.broker.engine.preemption import LOOKS, Lack, expendable, victims
from mlx_swarm.broker.engine.work import Admit, Decode, Hold, Preempt, Wait, Work
from mlx_swarm.broker.request import RequestId as R
from tests.engine.scheduling import FakeEngine
from tests.engine.test_fairness import Backlog, Job

SMALL = 40
"""Tokens of a slice in these tests."""


def preempted(engine: FakeEngine) -> list[tuple[str, str, str]]:
    """Who went for whom, and why."""
    return [(left, to, why) for left, to, why in engine.works(Preempt)]


def admissions(engine: FakeEngine) -> list[R]:
    return [work.request for work in engine.works(Admit)]


def until(engine: FakeEngine, kind: type[Work], count: int) -> None:
    while len(engine.works(kind)) < count:
        assert engine.turn() is not None


def test_a_more_urgent_request_gets_the_place_of_who_was_admitted_last() -> None:
    engine = FakeEngine(max_rows=2, output=30)
    for name in "ab":
        engine.submit(name, [ord(name)] * 9)
    until(engine, Decode, 3)
    engine.submit("urgent", [1] * 9, priority=1)
    assert engine.turn() == Preempt(R("b"), R("urgent"), "priority")
    assert engine.turn() == Admit(R("urgent"), False)
    engine.drain()
    assert len(engine.works(Preempt)) == 1
    assert admissions(engine) == ["a", "b", "urgent", "b"]
    assert engine.decoded[R("b")] == 30
    assert engine.recomputed == 0


def test_the_lowest_priority_goes_first_then_whose_agent_has_attained_most() -> None:
    engine = FakeEngine(max_rows=3, output=100)
    for name, priority in (("old", 0), ("low", -1), ("new", 0)):
        engine.submit(name, [ord(name[0])] * 9, priority=priority, party=Party(agent=name))
    until(engine, Decode, 3)
    engine.scheduler._entries[R("old")].account.pay(500)
    for number in range(2):
        engine.submit(f"urgent{number}", [number] * 9, priority=1)
    engine.drain()
    assert preempted(engine)[:2] == [
        ("low", "urgent0", "priority"),
        ("old", "urgent1", "priority"),
    ]


def test_nobody_goes_for_an_equal_or_a_less_urgent_request() -> None:
    engine = FakeEngine(max_rows=1, output=30)
    engine.submit("running", [1] * 9)
    until(engine, Decode, 3)
    engine.submit("equal", [2] * 9)
    engine.submit("less", [3] * 9, priority=-1)
    engine.drain()
    assert engine.works(Preempt) == []


def test_as_few_go_as_make_enough_room_and_none_if_all_would_not() -> None:
    engine = FakeEngine(max_rows=8, room=100, output=60)
    for name, size in (("big", 50), ("small", 20), ("urgent", 30)):
        engine.submit(name, [size] * size, priority=5 * (name == "urgent"))
    until(engine, Decode, 2)
    engine.submit("other", [1] * 45, priority=3)
    assert engine.turn() == Hold(R("other"), 0)
    assert engine.turn() == Preempt(R("big"), R("other"), "priority")
    assert engine.turn() == Admit(R("other"), False)
    engine.submit("more", [2] * 120, priority=4)
    assert engine.turn() == Hold(R("more"), 1)
    engine.drain()
    assert preempted(engine) == [("big", "other", "priority")]


def test_nobody_goes_where_rows_have_nothing_of_what_is_lacking() -> None:
    """Memory that is being written to the cold tier, say."""
    engine = FakeEngine(max_rows=1, output=30)
    engine.submit("running", [1] * 9)
    until(engine, Decode, 3)
    engine.scheduler._has_memory = lambda request: request not in engine.prompts
    engine.submit("urgent", [2] * 9, priority=1)
    for _ in range(10):
        engine.turn()
    assert engine.works(Preempt) == []
    engine.scheduler._has_memory = lambda request: True
    engine.scheduler.memory_changed()
    engine.drain()
    assert len(engine.works(Preempt)) == 1


def test_rows_of_equal_priority_take_turns_of_a_slice() -> None:
    engine = FakeEngine(max_rows=1, output=200, slice_tokens=SMALL)
    for name in "ab":
        engine.submit(name, [ord(name)] * 9, party=Party(agent=name))
    engine.drain()
    assert {reason for *_, reason in preempted(engine)} == {"slice"}
    order = admissions(engine)
    assert all(one != other for one, other in pairwise(order))
    assert 4 <= len(order) <= 2 * (209 // SMALL + 1)
    assert engine.recomputed == 0


def test_rows_of_one_agent_never_take_turns() -> None:
    engine = FakeEngine(max_rows=1, output=200, slice_tokens=SMALL)
    for name in "ab":
        engine.submit(name, [ord(name)] * 9, party=Party(agent="same"))
    engine.drain()
    assert engine.works(Preempt) == []


def test_who_was_preempted_comes_back_before_the_rest_of_its_agent_s_queue() -> None:
    engine = FakeEngine(max_rows=1, output=30)
    for number in range(3):
        engine.submit(f"r{number}", [number] * 9, party=Party(agent="a"))
    until(engine, Decode, 3)
    engine.submit("urgent", [9] * 9, priority=1)
    engine.drain()
    assert admissions(engine) == ["r0", "urgent", "r0", "r1", "r2"]


def test_a_prompt_that_others_wait_for_is_left_and_one_of_them_goes_on() -> None:
    engine = FakeEngine(max_rows=2, prefill_chunk=10, output=3)
    shared = list(range(100))
    leader = engine.submit("leader", [*shared, 1, 2])
    engine.submit("follower", [*shared, 3, 4])
    for _ in range(5):
        engine.turn()
    for number in range(2):
        engine.submit(f"urgent{number}", [number] * 30, priority=1)
    engine.drain()
    assert [request for request, *_ in preempted(engine)] == ["leader"]
    assert sum(engine.computed.values()) == len(engine.computed)
    assert engine.decoded[R("follower")] == engine.decoded[leader] == 3


def test_what_a_row_computes_after_it_came_back_is_shared_as_well() -> None:
    engine = FakeEngine(max_rows=2, output=20, lasting=True)
    same, prompt = Party(agent="same"), list(range(100))
    first = engine.submit("first", prompt, party=same)
    engine.submit("other", [7] * 9, priority=5, output=60)
    while engine.decoded[first] < 4:
        engine.turn()
    answers = [1_000_000 + number for number in range(10)]
    engine.submit("fork", [*prompt, *answers, 5], party=same)
    for _ in range(3):
        engine.turn()
    assert engine.works(Wait) == [Wait(R("fork"), first, 104)]
    engine.preempt(first)
    while engine.decoded[first] < 9:
        engine.turn()
    engine.submit("late", [1])
    for _ in range(3):
        engine.turn()
    assert engine.works(Wait)[-1] == Wait(R("fork"), first, 109)
    engine.drain()


def test_what_no_cache_keeps_has_longer_slices_the_longer_it_is() -> None:
    engine = FakeEngine(max_rows=1, output=400, slice_tokens=SMALL)
    for name in "ab":
        engine.submit(name, [ord(name)] * 9, namespace=None, party=Party(agent=name))
    engine.drain()
    assert 2 <= len(engine.works(Preempt)) <= 10
    assert 0 < engine.recomputed <= 2 * 2 * 409


def test_a_lane_that_cannot_interrupt_its_rows_keeps_them() -> None:
    engine = FakeEngine(max_rows=1, output=30)
    engine.lane.preempts = False
    engine.submit("running", [1] * 9)
    until(engine, Decode, 3)
    engine.submit("urgent", [2] * 9, priority=1)
    engine.drain()
    assert engine.works(Preempt) == []


def test_where_memory_runs_short_all_rows_but_the_best_may_go() -> None:
    engine = FakeEngine(max_rows=3, output=30)
    for name, priority in (("low", -1), ("high", 1), ("mean", 0)):
        engine.submit(name, [ord(name[0])] * 9, priority=priority)
    assert engine.scheduler.expendable() == []
    until(engine, Decode, 3)
    assert engine.scheduler.expendable() == ["low", "mean"]
    engine.drain()


JOBS = st.lists(
    st.builds(Job, st.integers(1, 400), st.sampled_from([1, 60, 2000])), min_size=1, max_size=3
)


@given(JOBS, JOBS, st.integers(1, 3))
@settings(max_examples=12, deadline=None)
def test_what_busy_agents_get_differs_by_slices_however_long_their_requests_are(
    first: list[Job], second: list[Job], rows: int
) -> None:
    """The bound that `fairness` states; a slice ends with a look, which are so many apart."""
    a, b, chunk = Party(agent="a"), Party(agent="b"), 64
    engine = FakeEngine(max_rows=rows, prefill_chunk=chunk, slice_tokens=SMALL)
    backlog = Cached(engine, {a: first, b: second})
    bound = (rows + 1) * (SMALL + QUANTUM + chunk + SMALL // LOOKS + 1)
    while engine.served.total() < 5 * bound:
        backlog.turn()
        assert abs(engine.served[a] - engine.served[b]) <= bound


class Cached(Backlog):
    """Requests that the cache keeps."""

    def submit(self, party: Party, job: Job) -> R:
        number = self.engine.submitted
        tokens = [number] * job.prompt
        return self.engine.submit(f"r{number}", tokens, party=party, output=job.output)


class Life(NamedTuple):
    """A request, and what becomes of it."""

    agent: str
    priority: int
    prompt: int
    output: int
    shared: int
    turns: int
    is_cached: bool
    cancel_after: int | None


LIVES = st.lists(
    st.builds(
        Life,
        agent=st.sampled_from(["", "x", "y"]),
        priority=st.integers(-1, 2),
        prompt=st.integers(1, 60),
        output=st.integers(1, 90),
        shared=st.sampled_from([0, 20, 50]),
        turns=st.integers(0, 30),
        is_cached=st.booleans(),
        cancel_after=st.none() | st.integers(0, 60),
    ),
    min_size=2,
    max_size=10,
)


@given(
    LIVES,
    st.integers(1, 3),
    st.sampled_from([0.0, 0.2]),
    st.sampled_from([110, 160, 1 << 30]),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=200, deadline=None, phases=[Phase.reuse, Phase.generate])
def test_nobody_goes_for_nothing_nobody_goes_to_and_fro_and_all_end(
    lives: list[Life], rows: int, turn_seconds: float, room: int, lasting: bool, refuses: bool
) -> None:
    engine = FakeEngine(
        max_rows=rows,
        turn_seconds=turn_seconds,
        room=room,
        lasting=lasting,
        refuses=refuses,
        slice_tokens=SMALL,
    )
    rules = Rules(engine)
    due: list[tuple[int, R]] = []
    for number, life in enumerate(lives):
        tokens = [*range(life.shared), *([1000 + number] * life.prompt)]
        request = engine.submit(
            f"r{number}",
            tokens,
            party=Party(agent=life.agent),
            priority=life.priority,
            output=life.output,
            namespace="shared" if life.is_cached else None,
        )
        rules.priorities[request] = life.priority
        if life.cancel_after is not None:
            due.append((len(engine.log) + life.cancel_after, request))
        for _ in range(life.turns):
            rules.turn()
            rules.cancel(due)
    while rules.turn():
        rules.cancel(due)
    engine.drain()
    scheduler = engine.scheduler
    assert (scheduler._accounts.size(), scheduler._accounts.open, scheduler.queued) == (0, 0, 0)
    assert not scheduler._leaving
    for life, request in zip(lives, rules.priorities, strict=True):
        assert engine.decoded[request] == life.output or life.cancel_after is not None


class Rules:
    """Turns of an engine in which every preemption is looked at."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.priorities: dict[R, int] = {}
        self.owed: R | None = None
        self.last: dict[R, int] = {}

    def turn(self) -> bool:
        """One piece of work, by the rules."""
        engine = self.engine
        before = {request: self.progress(request) for request in engine.prompts}
        work = engine.turn()
        assert len(engine.positions) <= 1 or engine._used() <= engine.room
        if self.owed is not None and self.owed not in engine.prompts:
            self.owed = None
        match work:
            case Preempt(request, beneficiary, reason):
                assert self.owed in (None, beneficiary)
                self.owed = beneficiary
                high, low = self.priorities[beneficiary], self.priorities[request]
                # Who waits for what a row computes lends it its priority.
                assert high > low if reason == "priority" else high >= low
                since = before[request] - self.last.get(request, 0)
                if reason == "slice" or request in self.last:
                    assert since >= SMALL - 1
                self.last[request] = before[request]
            case Admit(request):
                assert self.owed in (None, request)
                self.owed = None
        return work is not None

    def progress(self, request: R) -> int:
        """Tokens that were computed for a request for the first time, and the one after them."""
        position = self.engine.positions.get(request, 0)
        return max(position, self.engine.reached[request]) + self.new_outputs(request)

    def new_outputs(self, request: R) -> int:
        return self.engine.decoded[request] - self.engine.resumed_at[request]

    def cancel(self, due: list[tuple[int, R]]) -> None:
        """Cancel who is due."""
        for at, request in list(due):
            if at <= len(self.engine.log):
                due.remove((at, request))
                if request in self.engine.prompts:
                    self.engine.cancel(request)


class Arrivals(NamedTuple):
    """What an adversary sends for ever, in turn."""

    agents: list[str]
    priorities: list[int]
    jobs: list[Job]


@given(
    st.builds(
        Arrivals,
        st.lists(st.sampled_from(["", "a", "b", "victim"]), min_size=1, max_size=4),
        st.lists(st.integers(-2, 2), min_size=1, max_size=4),
        st.lists(st.builds(Job, st.integers(1, 40), st.integers(1, 90)), min_size=1, max_size=4),
    ),
    st.integers(-2, 2),
    st.integers(1, 3),
    st.integers(41, 90),
)
@settings(max_examples=25, deadline=None)
def test_nobody_starves_whatever_arrives(
    arrivals: Arrivals, priority: int, rows: int, room: int
) -> None:
    """A request that is preempted again and again comes to its end all the same."""
    engine = FakeEngine(max_rows=rows, turn_seconds=0.5, room=room, slice_tokens=SMALL)
    agents, priorities, jobs = arrivals
    source = zip(cycle(agents), cycle(priorities), cycle(jobs), strict=False)

    def fill() -> None:
        while len(engine.prompts) < rows + 5:
            agent, its, job = next(source)
            number = engine.submitted
            engine.submit(
                f"r{number}",
                [number] * job.prompt,
                party=Party(agent=agent),
                priority=its,
                output=job.output,
            )

    fill()
    victim = engine.submit(
        "victim", [7] * 40, party=Party(agent="victim"), priority=priority, output=100
    )
    for _ in range(20_000):
        fill()
        engine.turn()
        if victim not in engine.prompts:
            break
    assert victim not in engine.prompts
    engine.drain()


class Runner(Claim):
    """A row as the policy sees it."""

    def __init__(
        self, account: Account, priority: int, fresh: float, is_guarded: bool, number: int
    ) -> None:
        super().__init__(account, priority, 1)
        self.urgency = priority
        self.fresh = fresh
        self.is_guarded = is_guarded
        self.number = number
        self.lost = 0


ROWS = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.integers(0, 2),
        st.integers(0, 2 * SMALL),
        st.booleans(),
        st.integers(0, 50),
    ),
    max_size=6,
)


@given(
    ROWS,
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 100)),
    st.integers(0, 2),
    st.booleans(),
    st.integers(0, 120),
)
@settings(max_examples=300, deadline=None)
def test_the_victims_are_allowed_enough_and_none_of_them_too_many(
    rows: list[tuple[str, int, int, bool, int]],
    attained: dict[str, int],
    priority: int,
    lacks_row: bool,
    nbytes: int,
) -> None:
    root = Account()
    accounts = {name: root.agent(Party(agent=name)) for name in "abcd"}
    for name, tokens in attained.items():
        accounts[name].pay(tokens)
    waiter = Runner(accounts["d"], priority, 0, False, 0)
    runners = [
        Runner(accounts[name], its, fresh, guarded, number)
        for number, (name, its, fresh, guarded, _) in enumerate(rows)
    ]
    sizes = Counter({runner: row[-1] for runner, row in zip(runners, rows, strict=True)})
    lack = Lack(lacks_row, nbytes)

    def is_allowed(row: Runner) -> bool:
        if row.priority < priority:
            return not row.is_guarded or row.fresh >= SMALL
        ahead = ahead_of(row.account, waiter.account)
        return row.priority == priority and row.fresh >= SMALL and ahead >= SMALL

    def is_enough(chosen: list[Runner]) -> bool:
        return bool(chosen or not lacks_row) and sum(sizes[row] for row in chosen) >= nbytes

    willing = [row for row in runners if is_allowed(row)]
    chosen = victims(waiter, runners, lack, sizes.__getitem__, SMALL)
    assert set(chosen) <= set(willing)
    assert [row.priority for row in chosen] == sorted(row.priority for row in chosen)
    if not is_enough(willing):
        assert chosen == []
        return
    assert is_enough(chosen)
    for row in chosen:
        assert not is_enough([each for each in chosen if each is not row])
    order = expendable(runners)
    assert len(order) == max(0, len(runners) - 1)
    assert [row.priority for row in order] == sorted(row.priority for row in order)
