"""Who runs next: shares of what is computed, priorities and aging, by the scheduler's own work."""

from collections import Counter
from itertools import cycle, islice
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_swarm.broker.engine.fairness import (
    AGING_SECONDS,
    PREFILL_QUANTUM,
    QUANTUM,
    Account,
    Party,
)
from mlx_swarm.broker.engine.work import Admit, Decode, Hold, Part, Preempt, Prefill, Wait
from mlx_swarm.broker.request import RequestId as R
from tests.engine.scheduling import FakeEngine, FakeLane

LONGEST = 200


class Job(NamedTuple):
    """What one request costs."""

    prompt: int
    output: int


JOBS = st.lists(
    st.builds(Job, st.integers(1, LONGEST), st.integers(1, LONGEST)), min_size=1, max_size=4
)


class Backlog:
    """Parties that always have requests queued, each with the same jobs in turn."""

    def __init__(self, engine: FakeEngine, jobs: dict[Party, list[Job]], depth: int = 2) -> None:
        self.engine = engine
        self._jobs = {party: cycle(its) for party, its in jobs.items()}
        self._depth = depth

    def turn(self) -> None:
        """Fill up the queue, and one piece of work."""
        queued = Counter(self.engine.parties[each] for each in waiting(self.engine))
        for party, jobs in self._jobs.items():
            for job in islice(jobs, max(0, self._depth - queued[party])):
                self.submit(party, job)
        self.engine.turn()

    def submit(self, party: Party, job: Job) -> R:
        """One request more, which shares nothing with any other."""
        number = self.engine.submitted
        tokens = [number] * job.prompt
        return self.engine.submit(
            f"r{number}", tokens, namespace=None, party=party, output=job.output
        )


def waiting(engine: FakeEngine) -> list[R]:
    """Requests without a row."""
    return [request for request in engine.prompts if request not in engine.positions]


@given(JOBS, JOBS, st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_what_two_busy_agents_get_differs_by_no_more_than_is_stated(
    first: list[Job], second: list[Job], rows: int
) -> None:
    a, b = Party(agent="a"), Party(agent="b")
    backlog = Backlog(FakeEngine(max_rows=rows), {a: first, b: second})
    largest = max(job.prompt + job.output for job in (*first, *second))
    bound = rows * largest
    served = backlog.engine.served
    while served.total() < 12 * bound:
        backlog.turn()
        assert abs(served[a] - served[b]) <= bound


def test_rows_are_shared_before_anything_is_computed_in_them() -> None:
    engine = FakeEngine(max_rows=4)
    for agent in "ab":
        for number in range(4):
            engine.submit(f"{agent}{number}", [1] * 9, namespace=None, party=Party(agent=agent))
    assert [engine.turn() for _ in range(4)] == [
        Admit(R(name), False) for name in ("a0", "b0", "a1", "b1")
    ]
    engine.drain()


def test_a_tenant_gets_no_more_for_having_more_swarms_and_agents() -> None:
    crowd = [Party("crowd", swarm, agent) for swarm in "st" for agent in "abcd"]
    loner = Party("loner", "s", "a")
    job = [Job(20, 20)]
    backlog = Backlog(FakeEngine(max_rows=4), dict.fromkeys([*crowd, loner], job))
    for _ in range(3000):
        backlog.turn()
    served = backlog.engine.served
    everything, most = served.total(), 4 * 40
    assert everything > 10 * most
    assert abs(served[loner] - everything / 2) <= most
    for swarm in "st":
        its = sum(count for party, count in served.items() if party[:2] == ("crowd", swarm))
        assert abs(its - everything / 4) <= most


def test_who_was_idle_has_saved_nothing_up_and_a_newcomer_starves_nobody() -> None:
    old, new, once = Party(agent="old"), Party(agent="new"), Party(agent="once")
    engine = FakeEngine(max_rows=1)
    backlog = Backlog(engine, {old: [Job(50, 10)]})
    backlog.turn()
    backlog.submit(once, Job(5, 5))
    while engine.served[old] < 5000:
        backlog.turn()
    both = Backlog(engine, {old: [Job(50, 10)], new: [Job(50, 10)], once: [Job(50, 10)]})
    before, goal = engine.served.copy(), engine.served[new] + 1000
    while engine.served[new] < goal:
        both.turn()
        since = [engine.served[party] - before[party] for party in (old, new, once)]
        assert max(since) - min(since) <= 2 * 60


class Arrivals(NamedTuple):
    """What an adversary sends for ever: parties, priorities and prompts in turn."""

    agents: list[str]
    priorities: list[int]
    prompts: list[int]


@given(
    st.builds(
        Arrivals,
        st.lists(st.sampled_from(["", "a", "b", "victim"]), min_size=1, max_size=4),
        st.lists(st.integers(-2, 2), min_size=1, max_size=4),
        st.lists(st.integers(1, 40), min_size=1, max_size=4),
    ),
    st.integers(-2, 2),
    st.integers(0, 2000),
    st.integers(1, 3),
    st.integers(41, 90),
)
@settings(max_examples=60, deadline=None)
def test_nobody_starves_whatever_arrives(
    arrivals: Arrivals, priority: int, debt: int, rows: int, room: int
) -> None:
    engine = FakeEngine(max_rows=rows, turn_seconds=0.5, room=room)
    source = zip(
        cycle(arrivals.agents), cycle(arrivals.priorities), cycle(arrivals.prompts), strict=False
    )
    number = 0

    def fill() -> None:
        nonlocal number
        while len(engine.prompts) < rows + 6:
            agent, its, length = next(source)
            number += 1
            engine.submit(
                f"r{number}",
                [number] * length,
                namespace=None,
                party=Party(agent=agent),
                priority=its,
            )

    fill()
    victim = engine.submit(
        "victim", [7] * 40, namespace=None, party=Party(agent="victim"), priority=priority
    )
    engine.scheduler._entries[victim].account.pay(debt)
    for _ in range(3000):
        fill()
        engine.turn()
        if victim in engine.positions:
            break
    assert victim in engine.positions
    engine.drain()


@given(
    st.lists(st.tuples(st.integers(-10, 10), st.integers(0, 8)), min_size=1, max_size=30),
    st.sampled_from([0.0, 0.3, 4.0]),
    st.integers(1, 3),
)
@settings(max_examples=100, deadline=None)
def test_a_higher_priority_goes_first_until_a_lower_one_has_aged(
    arrivals: list[tuple[int, int]], turn_seconds: float, rows: int
) -> None:
    engine = FakeEngine(max_rows=rows, turn_seconds=turn_seconds)
    priorities: dict[R, int] = {}
    since: dict[int, float] = {}
    promised: R | None = None

    def turn() -> None:
        nonlocal promised
        before = waiting(engine)
        work = engine.turn()
        if isinstance(work, Preempt):
            since.setdefault(priorities[work.request], engine.now)
            if promised != work.for_:
                # That was its turn, whoever comes before it is admitted.
                promised, since[priorities[work.for_]] = work.for_, engine.now
        if not isinstance(work, Admit):
            return
        if work.request == promised:
            promised = None
            return
        mine = priorities[work.request]
        for each in before:
            higher = priorities[each] - mine
            if higher > 0:
                assert engine.now - since[mine] >= AGING_SECONDS * higher - 1e-6
        since[mine] = engine.now
        for priority in {priorities[each] for each in before} - {
            priorities[each] for each in waiting(engine)
        }:
            del since[priority]

    for number, (priority, turns) in enumerate(arrivals):
        since.setdefault(priority, engine.now)
        request = engine.submit(f"r{number}", [number] * 5, namespace=None, priority=priority)
        priorities[request] = priority
        for _ in range(turns):
            turn()
    while engine.prompts:
        turn()


def test_a_lower_priority_has_a_turn_after_ten_seconds_a_level() -> None:
    engine = FakeEngine(max_rows=1, turn_seconds=1.0, output=1)
    low = engine.submit("low", [1], priority=-1)
    for number in range(40):
        engine.submit(f"high{number}", [1], priority=1)
    while low not in engine.positions:
        engine.turn()
    assert 2 * AGING_SECONDS <= engine.now <= 2 * AGING_SECONDS + 4
    engine.drain()


def test_what_is_served_in_one_lane_is_no_help_to_who_waits_for_a_place_in_another() -> None:
    engine = FakeEngine(max_rows=3, turn_seconds=1.0, output=1)
    serial = FakeLane(1, 16)
    engine.submit("urgent", [1], priority=2, lane=serial)
    low = engine.submit("low", [1], priority=-1, lane=serial)
    number = 0
    while low not in engine.positions:
        # Somebody more urgent for its lane and somebody of its own priority beside it, always.
        for lane, priority in ((serial, 2), (None, -1)):
            number += 1
            engine.submit(f"r{number}", [1], priority=priority, lane=lane)
        engine.turn()
        assert engine.now < 5 * AGING_SECONDS
    assert engine.now >= 3 * AGING_SECONDS
    engine.drain()


def test_once_in_ten_seconds_a_turn_goes_to_who_has_waited_longest() -> None:
    engine = FakeEngine(max_rows=1, turn_seconds=1.0, output=1)
    greedy = Party(agent="greedy")
    for number in range(3):
        request = engine.submit(f"greedy{number}", [1], party=greedy)
        engine.scheduler._entries[request].account.pay(10_000)
    for number in range(40):
        engine.submit(f"other{number}", [1])
    engine.drain()
    order = [work.request for work in engine.works(Admit)]
    turns = [order.index(R(f"greedy{number}")) for number in range(3)]
    # A turn, and a step for its token: two seconds for each of them.
    assert turns == [5, 10, 15]


def test_requests_of_one_agent_go_in_order_of_arrival() -> None:
    engine = FakeEngine(max_rows=1)
    for number in range(6):
        engine.submit(f"r{number}", [number] * (60 - 9 * number), party=Party(agent="a"))
    engine.drain()
    assert [work.request for work in engine.works(Admit)] == [f"r{n}" for n in range(6)]


def test_a_long_prompt_gives_way_once_it_is_a_quantum_ahead() -> None:
    engine = FakeEngine(prefill_chunk=200)
    engine.submit("long", list(range(6000)), party=Party(agent="a"))
    for _ in range(3):
        engine.turn()
    engine.submit("short", list(range(7000, 7300)), party=Party(agent="b"))
    engine.drain()
    order = [part.request for part in engine.parts]
    assert order.index(R("short")) <= 2 + PREFILL_QUANTUM // 200 + 1
    assert order.count(R("long")) == 30


def test_a_prompt_is_computed_first_if_it_is_more_urgent_or_somebody_urgent_waits_for_it() -> None:
    engine = FakeEngine(prefill_chunk=100)
    engine.submit("first", list(range(1000)))
    leader = engine.submit("leader", list(range(2000, 3000)))
    for _ in range(3):
        engine.turn()
    engine.submit("urgent", [*range(2000, 2900), 1, 2], priority=1)
    assert engine.turn() == Wait(R("urgent"), leader, 900)
    assert engine.turn() == Prefill((Part(leader, 0, 100),))
    engine.submit("most urgent", list(range(5000, 5300)), priority=2)
    engine.turn()
    assert engine.turn() == Prefill((Part(R("most urgent"), 0, 100),))
    engine.drain()


def test_a_prompt_that_waits_behind_urgent_ones_is_computed_in_the_end() -> None:
    engine = FakeEngine(prefill_chunk=100, turn_seconds=1.0, output=1)
    engine.submit("low", list(range(1000)), priority=0)
    for number in range(1, 30):
        engine.submit(f"high{number}", [number] * 300, namespace=None, priority=1)
        for _ in range(4):
            engine.turn()
    low = [at for at, part in enumerate(engine.parts) if part.request == "low"]
    assert len(low) > 5
    engine.drain()


def test_what_several_wait_for_is_paid_by_all_of_them() -> None:
    engine = FakeEngine(prefill_chunk=100)
    shared = list(range(4000))
    for agent in "abcd":
        engine.submit(f"{agent}1", [*shared, ord(agent), 1], party=Party(agent=agent))
    while not engine.works(Decode):
        engine.turn()
    for agent in "abcd":
        engine.submit(f"{agent}2", [*shared, ord(agent), 2], party=Party(agent=agent))
    attained = [engine.scheduler.standing(R(f"{agent}2")).agent for agent in "abcd"]
    assert max(attained) - min(attained) <= QUANTUM
    assert max(attained) <= len(shared) / 4 + QUANTUM + 5
    engine.drain()


def test_who_lacks_memory_in_its_turn_is_the_next_and_those_behind_wait() -> None:
    engine = FakeEngine(max_rows=4, room=100, output=30)
    running = engine.submit("running", [1] * 60, namespace=None)
    engine.turn()
    big = engine.submit("big", [2] * 80, namespace=None, party=Party(agent="big"))
    assert engine.turn() == Hold(big, 0)
    # Of the same agent as what runs, and so small that there is room for it.
    engine.scheduler._entries[big].account.pay(1000)
    for number in range(5):
        engine.submit(f"small{number}", [3] * 5, namespace=None)
    while running in engine.prompts:
        engine.turn()
    engine.drain()
    assert engine.works(Hold) == [Hold(big, 0)]
    assert [work.request for work in engine.works(Admit)][:2] == [running, big]


def test_a_more_urgent_request_goes_before_one_that_lacks_memory() -> None:
    engine = FakeEngine(max_rows=4, room=100, output=30)
    engine.submit("running", [1] * 60, namespace=None)
    engine.turn()
    engine.submit("big", [2] * 80, namespace=None)
    engine.turn()
    engine.submit("urgent", [3] * 5, namespace=None, priority=1)
    assert engine.turn() == Admit(R("urgent"), False)
    engine.drain()


class Life(NamedTuple):
    """A request, and what becomes of it."""

    party: Party
    priority: int
    prompt: int
    shared: int
    turns: int
    cancel_after: int | None


NAMES = st.sampled_from(["", "x", "y"])
LIVES = st.lists(
    st.builds(
        Life,
        party=st.builds(Party, NAMES, NAMES, NAMES),
        priority=st.integers(-2, 2),
        prompt=st.integers(1, 60),
        shared=st.sampled_from([0, 20, 50]),
        turns=st.integers(0, 6),
        cancel_after=st.none() | st.integers(0, 25),
    ),
    min_size=1,
    max_size=14,
)


@given(LIVES, st.integers(1, 4), st.sampled_from([0.0, 3.0]), st.sampled_from([120, 1 << 30]))
@settings(max_examples=150, deadline=None)
def test_every_request_ends_and_nothing_is_left_in_any_table(
    lives: list[Life], rows: int, turn_seconds: float, room: int
) -> None:
    engine = FakeEngine(max_rows=rows, turn_seconds=turn_seconds, room=room)
    due: list[tuple[int, R]] = []

    def turn() -> bool:
        is_busy = engine.turn() is not None
        for at, request in list(due):
            if at <= len(engine.log):
                due.remove((at, request))
                if request in engine.prompts:
                    engine.cancel(request)
        return is_busy

    for number, life in enumerate(lives):
        tokens = [*range(life.shared), *([1000 + number] * life.prompt)]
        request = engine.submit(f"r{number}", tokens, party=life.party, priority=life.priority)
        if life.cancel_after is not None:
            due.append((len(engine.log) + life.cancel_after, request))
        for _ in range(life.turns):
            turn()
    while turn():
        pass
    engine.drain()
    scheduler = engine.scheduler
    assert (scheduler._accounts.size(), scheduler._accounts.open, scheduler.queued) == (0, 0, 0)
    for queue in (scheduler._pending, scheduler._prefilling):
        tables = queue._waiting, queue._levels, queue._front
        assert not any(tables)


def test_accounts_of_those_who_left_are_forgotten_while_others_stay() -> None:
    root = Account()
    root.agent(Party(agent="stays")).begin()
    for number in range(1000):
        account = root.agent(Party(agent=f"agent-{number}"))
        account.begin()
        account.queue()
        account.leave_queue()
        account.charge(10)
        account.end()
    assert root.size() < 150
    root.check_integrity()
