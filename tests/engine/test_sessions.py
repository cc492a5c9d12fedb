"""Whose sessions are in memory together: budget, no starvation, who comes first, what is left."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_swarm.broker.engine.fairness import AGING_SECONDS, Party
from mlx_swarm.broker.engine.footprints import Footprints, Trail
from mlx_swarm.broker.engine.session import Shortage
from mlx_swarm.broker.engine.sessions import SESSION_IDLE_SECONDS, SWAP_SHARE, Sessions
from mlx_swarm.broker.engine.work import Admit, Decode
from mlx_swarm.broker.request import RequestId as R
from tests.engine.conversations import Conversations, Plan
from tests.engine.scheduling import FakeEngine

TOKEN_SECONDS = 0.01

PLANS = st.lists(
    st.builds(
        Plan,
        st.floats(0, 30),
        st.lists(st.integers(1, 60), min_size=1, max_size=4).map(tuple),
        st.floats(0, 40),
        st.booleans(),
        st.booleans(),
        st.integers(-1, 1),
        st.integers(1, 8),
    ),
    min_size=1,
    max_size=9,
)


def engine(budget: float, rows: int = 4) -> FakeEngine:
    """An engine with so much room for sessions, whose turns take time."""
    return FakeEngine(
        max_rows=rows, lasting=True, budget=budget, token_seconds=TOKEN_SECONDS, turn_seconds=0.05
    )


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 2), max_size=5), st.integers(0, 3))
    ),
    st.data(),
)
@settings(deadline=None)
def test_footprints_are_the_nodes_of_one_tree(
    steps: list[tuple[str, list[int], int]], data: st.DataObject
) -> None:
    footprints, there = Footprints(), list[Trail]()

    def oracle(trails: list[Trail]) -> int:
        nodes = {
            (trail.namespace, tuple(trail.tokens.tolist()[: end + 1]))
            for trail in trails
            for end in range(len(trail))
        }
        return 3 * len(nodes) + sum(3 * trail.more + 5 for trail in trails)

    for namespace, tokens, more in steps:
        trail = Trail.of(namespace, np.array(tokens, np.uint32), more, 3, 5)
        assert footprints.adds(trail) == oracle([*there, trail]) - oracle(there)
        footprints.add(trail)
        there.append(trail)
        if data.draw(st.booleans()):
            gone = there.pop(data.draw(st.integers(0, len(there) - 1)))
            footprints.remove(gone)
        assert footprints.total == oracle(there)
        footprints.check_integrity(there)


@given(PLANS, st.integers(0, 20), st.integers(1, 150), st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_every_turn_ends_the_budget_holds_and_nothing_is_left(
    plans: list[Plan], shared: int, budget: int, rows: int
) -> None:
    """`check_integrity`, after every turn, asserts the budget."""
    fake = engine(budget, rows)
    conversations = Conversations(fake, plans, shared)
    conversations.run()
    assert len(conversations.waited) == sum(len(plan.turns) for plan in plans)
    # Each waits for at most all others to have their turns by age, one after the other.
    turn = 0.05 * 4 * max(sum(plan.turns) + plan.output + shared for plan in plans)
    swap = max(AGING_SECONDS, SWAP_SHARE * TOKEN_SECONDS * 4 * 60 + SWAP_SHARE * TOKEN_SECONDS * 40)
    bound = (len(plans) + 2) * (swap + AGING_SECONDS + (len(plans) + 1) * turn)
    assert max(conversations.waited.values()) <= bound
    fake.now += SESSION_IDLE_SECONDS + 1
    fake.sessions.forget()
    assert not fake.sessions._table
    assert not fake.sessions._returning
    assert fake.sessions.statistics().bytes == 0
    fake.sessions.check_integrity()


@given(PLANS, st.integers(0, 20), st.integers(1, 5))
@settings(max_examples=10, deadline=None)
def test_where_all_fits_the_same_is_done_as_without(
    plans: list[Plan], shared: int, rows: int
) -> None:
    everything = sum(shared + sum(plan.turns) + plan.output for plan in plans)
    logs = []
    for budget in (everything, math.inf):
        fake = engine(budget, rows)
        Conversations(fake, plans, shared).run()
        assert fake.sessions.statistics().replaced == 0
        logs.append([None if isinstance(work, Decode) else work for work in fake.log])
    assert logs[0] == logs[1]


@given(PLANS, st.integers(1, 150), st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_while_sessions_wait_the_turns_of_admitted_ones_come_first(
    plans: list[Plan], budget: int, rows: int
) -> None:
    """But for who has waited long, and who is more urgent."""
    fake = engine(budget, rows)
    conversations = Conversations(fake, plans)
    sessions = fake.sessions
    while conversations._due or conversations._open:
        asked = set(conversations.asked)
        admitted = {session.party for session in sessions._admitted}
        waiting = {session.party: since for session, since in sessions._waiting.items()}
        queued = [request for request in fake.prompts if request not in fake.positions]
        before = len(fake.log)
        conversations.turn()
        for work in fake.log[before:]:
            if not isinstance(work, Admit) or conversations.asked.keys() != asked:
                continue
            party = fake.parties[work.request]
            if party in admitted or not waiting:
                continue
            plan = conversations.plans[int(party.agent.split("-")[1])]
            is_old = party in waiting and fake.now - waiting[party] >= AGING_SECONDS
            passed = [
                each
                for each in queued
                if fake.parties[each] in admitted
                and conversations.plans[int(str(each).split("/")[0])].priority >= plan.priority
            ]
            assert is_old or not passed


def test_a_new_session_waits_until_one_ends_and_admitted_ones_go_on() -> None:
    fake = engine(45, rows=1)
    plans = [
        Plan(0, (10, 5, 5), 0.1, hints=True),
        Plan(0, (10, 5, 5), 0.1, hints=True),
        Plan(0.1, (20,), 0.1),
    ]
    Conversations(fake, plans).run()
    order = [work.request for work in fake.works(Admit)]
    last_first = min(order.index(R("0/2")), order.index(R("1/2")))
    assert order.index(R("2/0")) > last_first
    assert fake.sessions.statistics().replaced == 0


def policy(budget: float, rate: float = 1.0) -> tuple[Sessions, list[float]]:
    """A policy and its clock."""
    now = [0.0]
    return Sessions(budget, lambda: now[0], lambda tokens: tokens / rate), now


def trail(number: int, tokens: int) -> Trail:
    """A sequence of its own."""
    return Trail.of("n", np.full(tokens, number, np.uint32), 0)


def party(number: int) -> Party:
    return Party(agent=f"agent-{number}")


def turn(sessions: Sessions, number: int, tokens: int, hint: float | None = None) -> None:
    """One turn from its arrival to its end."""
    name = R(f"{number} {tokens}")
    sessions.arrived(name, party(number), trail(number, tokens))
    assert sessions.may_start(name)
    sessions.started(name)
    sessions.ended(name, trail(number, tokens), tokens, hint)
    sessions.check_integrity()


def runs(sessions: Sessions, number: int, tokens: int) -> None:
    """A turn that goes on."""
    name = R(f"{number} runs")
    sessions.arrived(name, party(number), trail(number, tokens))
    assert sessions.may_start(name)
    sessions.started(name)


def test_a_place_is_kept_for_as_long_as_its_recomputing_is_worth() -> None:
    """10 tokens take 5 seconds: 5 where nobody runs, 10 beside one that does."""
    sessions, now = policy(30, rate=2.0)
    runs(sessions, 0, 10)
    turn(sessions, 1, 10)
    sessions.arrived(R("new"), party(2), trail(2, 15))
    for now[0] in (0.0, 4.0):
        assert not sessions.may_start(R("new"))
        assert sessions.next_change() == 10.0
    assert not sessions.is_due()
    sessions.ended(R("0 runs"), trail(0, 10), 10)
    assert not sessions.may_start(R("new"))
    assert sessions.next_change() == 5.0
    now[0] = 5.0
    assert sessions.is_due()
    assert not sessions.is_due()
    assert sessions.may_start(R("new"))


def test_an_expected_turn_keeps_its_place_and_one_that_is_far_off_does_not() -> None:
    for hint, waits in ((19.0, True), (21.0, False), (math.inf, False)):
        sessions, _ = policy(30)
        runs(sessions, 0, 10)
        turn(sessions, 1, 10, hint)
        sessions.arrived(R("new"), party(2), trail(2, 15))
        assert sessions.may_start(R("new")) is not waits


def test_places_of_a_swarm_whose_agents_do_not_come_back_are_kept_less_and_less() -> None:
    sessions, now = policy(30)
    waits = []
    for number in range(12):
        name, came = R(f"once {number}"), now[0]
        sessions.arrived(name, party(number), trail(number, 20))
        while not sessions.may_start(name):
            now[0] = sessions.next_change()
        waits.append(now[0] - came)
        sessions.started(name)
        sessions.ended(name, trail(number, 20), 20)
    assert waits[0] == 0.0
    assert waits[1] == AGING_SECONDS
    assert waits[-1] < 2.0
    turn(sessions, 11, 21)
    turn(sessions, 11, 22)
    sessions.arrived(R("new"), party(12), trail(12, 20))
    assert not sessions.may_start(R("new"))
    assert sessions.next_change() - now[0] > 5.0


def test_what_is_known_later_goes_before_what_the_request_said() -> None:
    sessions, _ = policy(30)
    runs(sessions, 0, 10)
    sessions.expect(party(0), math.inf)
    assert sessions.ended(R("0 runs"), trail(0, 10), 10, 1.0) == math.inf
    assert not sessions._table


def test_who_has_waited_long_takes_the_place_of_who_had_most_service() -> None:
    sessions, now = policy(30, rate=0.1)
    heard: list[tuple[str, object]] = []

    class Ear:
        def waits(self, request: R, shortage: Shortage) -> None:
            heard.append((request, shortage))

        def replaced(self, who: Party, last: Trail | None, request: R) -> None:
            heard.append((who.agent, request))

    sessions._observer = Ear()
    for tokens in (4, 5):
        turn(sessions, 0, tokens, 20.0)
    turn(sessions, 1, 6, 20.0)
    runs(sessions, 2, 10)
    sessions.arrived(R("new"), party(3), trail(3, 12))
    assert not sessions.may_start(R("new"))
    assert heard == [("new", Shortage(12, 21, 30))]
    now[0] = AGING_SECONDS
    assert sessions.may_start(R("new"))
    sessions.started(R("new"))
    assert heard[1:] == [("agent-0", R("new"))]
    sessions.check_integrity()


def test_a_pinned_session_keeps_its_place_but_from_who_has_waited_long() -> None:
    sessions, now = policy(30, rate=1e9)
    runs(sessions, 0, 10)
    turn(sessions, 1, 10)
    sessions.pinned(party(1), 1000.0)
    sessions.arrived(R("new"), party(2), trail(2, 15))
    now[0] = 1.0
    assert not sessions.may_start(R("new"))
    sessions.pinned(party(1), 0.0)
    assert sessions.may_start(R("new"))
    sessions.pinned(party(1), 1000.0)
    assert not sessions.may_start(R("new"))
    now[0] = 12.0
    assert sessions.may_start(R("new"))


def test_a_session_whose_output_may_be_too_large_runs_alone() -> None:
    fake = engine(20)
    plans = [
        Plan(0, (15, 1), 0.1, output=30),
        *(Plan(0, (3, 3, 3, 3), 0.1) for _ in range(5)),
    ]
    Conversations(fake, plans).run()


def test_a_prompt_that_cannot_be_kept_waits_for_nobody_and_nobody_for_it() -> None:
    sessions, _ = policy(20)
    for number, length in enumerate([15, 21, 40, 30]):
        sessions.arrived(R(str(number)), party(number), trail(number, length))
        assert sessions.may_start(R(str(number)))
        sessions.started(R(str(number)))
        sessions.check_integrity()
    sessions.arrived(R("small"), party(9), trail(9, 15))
    assert not sessions.may_start(R("small"))
    sessions.ended(R("0"), trail(0, 15), 15, math.inf)
    assert sessions.may_start(R("small"))
    for number in (1, 2, 3):
        assert sessions.ended(R(str(number)), trail(number, 10), 10, 3.0) == 3.0
    assert sessions.statistics().waiting == 1
    sessions.check_integrity()


def test_ten_thousand_short_sessions_leave_no_entry() -> None:
    sessions, now = policy(math.inf)
    for number in range(10_000):
        name = R(str(number))
        sessions.arrived(name, party(number), trail(number, 3))
        sessions.started(name)
        sessions.ended(name, trail(number, 3), 3)
        now[0] += 1.0
    assert len(sessions._table) <= SESSION_IDLE_SECONDS + AGING_SECONDS + 1
    now[0] += SESSION_IDLE_SECONDS + 1
    sessions.forget()
    assert not sessions._table
    assert not sessions._returning
    sessions.check_integrity()


def test_who_may_start_is_not_worked_out_again_until_something_changes() -> None:
    """Asked for anew at every look while it waits for memory."""
    asked: list[int] = []

    def recompute(tokens: int) -> float:
        asked.append(tokens)
        return 0.0

    sessions = Sessions(1000.0, lambda: 0.0, recompute)
    for number in range(100):
        request = R(f"r{number}")
        tokens = np.full(10, number, np.uint32)
        sessions.arrived(request, Party(agent=f"a{number}"), Trail.of("", tokens, 0))
        assert sessions.may_start(request)
        sessions.started(request)
        sessions.ended(request, Trail.of("", tokens, 0))
    new = R("new")
    sessions.arrived(new, Party(agent="new"), Trail.of("", np.full(10, 1000, np.uint32), 0))
    assert sessions.may_start(new)
    asked.clear()
    assert all(sessions.may_start(new) for _ in range(50))
    assert not asked
