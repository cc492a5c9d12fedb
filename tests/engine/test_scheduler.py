"""The scheduler against an engine without MLX: single-flight, admission, chunks, failover."""

from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_swarm.broker.cache.prefix_hash import Tokens
from mlx_swarm.broker.engine.leaders import MINIMUM_SHARED_TOKENS
from mlx_swarm.broker.engine.scheduler import Scheduler
from mlx_swarm.broker.engine.work import Admit, Decode, Part, Prefill, Store, Wait
from mlx_swarm.broker.request import RequestId as R
from tests.engine.scheduling import FakeEngine, FakeLane

SHARED = list(range(1000, 1100))


def test_requests_that_arrive_together_compute_their_shared_prefix_once() -> None:
    engine = FakeEngine()
    for agent in range(8):
        engine.submit(f"r{agent}", [*SHARED, *range(agent * 10, agent * 10 + 5)])
    engine.drain()
    assert sum(engine.computed.values()) == len(SHARED) + 8 * 4
    assert engine.works(Wait) == [Wait(R(f"r{n}"), R("r0"), len(SHARED)) for n in range(1, 8)]


def test_the_leader_stops_and_stores_exactly_where_a_follower_parts() -> None:
    engine = FakeEngine(prefill_chunk=1000)
    engine.submit("leader", [*SHARED, 1, 2, 3])
    engine.submit("follower", [*SHARED[:37], 7, 8])
    engine.drain()
    assert engine.parts[0] == Part(R("leader"), 0, 37)
    assert Store(R("leader"), 37) in engine.log[: engine.log.index(Admit(R("follower"), False))]


def test_a_follower_that_arrives_later_still_makes_the_leader_stop() -> None:
    engine = FakeEngine(prefill_chunk=10)
    engine.submit("leader", [*SHARED, 1, 2])
    for _ in range(3):
        engine.turn()
    engine.submit("follower", [*SHARED[:55], 7, 8])
    engine.drain()
    assert Part(R("leader"), 50, 55) in engine.parts


def test_a_leader_past_the_parting_point_stores_at_once() -> None:
    engine = FakeEngine(prefill_chunk=60)
    engine.submit("leader", [*SHARED, 1, 2])
    engine.turn()
    assert engine.turn() == Prefill((Part(R("leader"), 0, 60),))
    engine.submit("follower", [*SHARED[:55], 7, 8])
    assert engine.turn() == Wait(R("follower"), R("leader"), 55)
    assert engine.turn() == Store(R("leader"), 55)
    assert engine.turn() == Admit(R("follower"), False)
    assert engine.scheduler.statistics().prefilling == 2


def test_when_the_leader_is_cancelled_another_goes_on_from_what_it_computed() -> None:
    engine = FakeEngine(prefill_chunk=10)
    leader = engine.submit("leader", [*SHARED, 1, 2])
    engine.submit("second", [*SHARED, 3, 4])
    engine.submit("third", [*SHARED, 5, 6])
    for _ in range(6):
        engine.turn()
    engine.cancel(leader)
    engine.drain()
    assert sum(engine.computed.values()) == len(SHARED) + 2
    assert engine.works(Wait)[-1] == Wait(R("third"), R("second"), len(SHARED))


def test_when_the_leader_fails_another_starts_over() -> None:
    engine = FakeEngine(prefill_chunk=10)
    leader = engine.submit("leader", [*SHARED, 1, 2])
    engine.submit("second", [*SHARED, 3, 4])
    for _ in range(6):
        engine.turn()
    engine.fail(leader)
    engine.drain()
    assert engine.decoded[R("second")] == engine.output


def test_a_chain_of_leaders_computes_every_level_once() -> None:
    engine = FakeEngine()
    team = [*SHARED, *range(2000, 2050)]
    engine.submit("a", [*SHARED, 1, 2])
    engine.submit("b", [*team, 3, 4])
    engine.submit("c", [*team, 5, 6])
    engine.drain()
    assert max(engine.computed.values()) == 1
    assert Wait(R("c"), R("a"), len(SHARED)) in engine.log
    assert Wait(R("c"), R("b"), len(team)) in engine.log


def test_nobody_waits_for_a_few_tokens() -> None:
    engine = FakeEngine(minimum_shared=MINIMUM_SHARED_TOKENS)
    few = SHARED[: MINIMUM_SHARED_TOKENS - 1]
    engine.submit("a", [*few, *range(50)])
    engine.submit("b", [*few, *range(100, 150)])
    engine.drain()
    assert engine.works(Wait) == []
    assert Admit(R("b"), True) in engine.log


def test_stops_that_are_close_together_become_one() -> None:
    engine = FakeEngine(minimum_shared=MINIMUM_SHARED_TOKENS, prefill_chunk=1000)
    engine.submit("leader", [*SHARED, *range(50)], boundaries=(88,))
    engine.submit("first", [*SHARED[:90], 1, 2])
    engine.submit("second", [*SHARED[:95], 3, 4])
    engine.drain()
    assert Part(R("leader"), 0, 95) in engine.parts
    assert max(engine.computed.values()) == 1


def test_boundaries_are_stored_for_those_who_come_later() -> None:
    engine = FakeEngine(prefill_chunk=1000)
    engine.submit("only", [*SHARED, 1, 2], boundaries=(40, 80, 5000))
    engine.drain()
    assert [part.stop for part in engine.parts] == [40, 80, len(SHARED) + 1]


def test_who_needs_log_probabilities_follows_who_computes_them_and_others_follow_anybody() -> None:
    engine = FakeEngine()
    asks = {"plain": None, "own": 0, "more": 0, "top": 3, "last": None}
    for number, (name, alternatives) in enumerate(asks.items()):
        own = range(number * 10, number * 10 + 5)
        engine.submit(name, [*SHARED, *own], alternatives=alternatives)
    engine.drain()
    assert [(each.request, each.leader) for each in engine.works(Wait)] == [
        ("more", "own"),
        ("last", "plain"),
    ]
    # Where it parts, the token before is computed again.
    assert sum(engine.computed.values()) == 3 * (len(SHARED) + 4) + 5 + 4


@given(
    asked=st.lists(
        st.tuples(
            st.sampled_from([None, 0, 0, 2]), st.integers(0, 100), st.integers(0, 2), st.booleans()
        ),
        min_size=1,
        max_size=10,
    ),
    lasting=st.booleans(),
    rows=st.integers(1, 4),
)
@settings(deadline=None)
def test_nobody_goes_round_in_circles_for_log_probabilities(
    asked: list[tuple[int | None, int, int, bool]], lasting: bool, rows: int
) -> None:
    engine = FakeEngine(lasting=lasting, max_rows=rows, prefill_chunk=30)
    for number, (alternatives, shared, own, is_late) in enumerate(asked):
        engine.turn() if is_late else None
        engine.submit(f"r{number}", [*SHARED[:shared], own, 7], alternatives=alternatives)
    engine.drain()


def test_other_namespaces_and_uncached_requests_share_nothing() -> None:
    engine = FakeEngine()
    engine.submit("a", [*SHARED, 1], namespace="one")
    engine.submit("b", [*SHARED, 1], namespace="two")
    engine.submit("c", [*SHARED, 1], namespace=None)
    engine.submit("d", [*SHARED, 1], namespace=None)
    engine.drain()
    assert engine.works(Wait) == []
    assert not any(work.request in ("c", "d") for work in engine.works(Store))


def test_a_one_token_prompt_decodes_at_once() -> None:
    engine = FakeEngine()
    engine.submit("one", [5])
    engine.drain()
    assert engine.log == [Admit(R("one"), False), Decode(engine.lane), Decode(engine.lane)]


def test_a_long_prefill_lets_running_rows_go_on_after_every_chunk() -> None:
    engine = FakeEngine(prefill_chunk=16, output=50)
    engine.submit("running", [1, 2, 3])
    while engine.turn() != Decode(engine.lane):
        pass
    engine.submit("long", list(range(500)))
    engine.submit("short", list(range(600, 610)))
    engine.drain()
    since_decode = 0
    for work in engine.log[engine.log.index(Decode(engine.lane)) :]:
        match work:
            case Prefill(parts):
                since_decode += sum(part.stop - part.start for part in parts)
                assert since_decode <= 16
            case Decode(engine.lane):
                since_decode = 0


def test_long_prompts_are_cut_at_multiples_of_the_chunk_wherever_they_begin() -> None:
    engine = FakeEngine(prefill_chunk=16, output=2)
    engine.submit("first", [*SHARED, *range(900, 910)])
    engine.drain()
    engine.submit("second", [*SHARED, *range(100)])
    engine.drain()
    parts = [part for work in engine.works(Prefill) for part in work.parts]
    of_second = [part for part in parts if part.request == "second"]
    assert of_second[0].start == len(SHARED)
    assert len(SHARED) % 16
    assert all(part.stop % 16 == 0 for part in of_second[:-1])
    assert all(0 < part.stop - part.start <= 16 for part in of_second)


def test_short_suffixes_are_prefilled_together_before_the_next_step() -> None:
    engine = FakeEngine(prefill_chunk=64, output=9)
    for agent in range(6):
        engine.submit(f"r{agent}", [*SHARED, *range(agent * 10, agent * 10 + 5)])
    engine.drain()
    assert [part.request for part in engine.works(Prefill)[-1].parts] == [
        f"r{agent}" for agent in range(6)
    ]
    assert len(engine.works(Decode)) == 9


def test_rows_beyond_the_limit_wait_in_order_of_arrival() -> None:
    engine = FakeEngine(max_rows=2)
    for name in "abcdef":
        engine.submit(name, [ord(name), 1, 2])
    engine.drain()
    assert [work.request for work in engine.works(Admit)] == list("abcdef")


def test_who_waited_for_what_could_not_be_stored_waits_for_nobody_again() -> None:
    engine = FakeEngine(refuses=True, max_rows=8)
    for agent in range(6):
        engine.submit(f"r{agent}", [*SHARED, *range(agent * 10, agent * 10 + 5)])
    engine.drain()
    assert len(engine.works(Wait)) == 5


def test_a_row_that_decodes_stores_once_somebody_has_a_use_for_it() -> None:
    engine = FakeEngine(output=20, lasting=True)
    first = engine.submit("first", [*SHARED, 1, 2, 3])
    while engine.decoded[first] < 4:
        engine.turn()
    assert engine.works(Store) == []
    engine.submit("other", [7, *SHARED])
    told = engine.held(first).tolist()
    engine.submit("fork", [*told, 5, 6])
    assert [engine.turn() for _ in range(4)] == [
        Admit(R("other"), False),
        Wait(R("fork"), first, len(told)),
        Store(first, len(told)),
        Admit(R("fork"), False),
    ]
    engine.drain()
    assert max(engine.computed.values()) == 1


class Arrival(NamedTuple):
    """A prompt made of segments that prompts share, and what happens around it."""

    segments: list[int]
    own: int
    turns: int
    cancel_after: int | None


SEGMENT_LENGTHS = (1, 3, 20, 40)
ARRIVALS = st.lists(
    st.builds(
        Arrival,
        segments=st.lists(st.integers(0, len(SEGMENT_LENGTHS) - 1), max_size=4),
        own=st.integers(1, 30),
        turns=st.integers(0, 6),
        cancel_after=st.none() | st.integers(0, 25),
    ),
    min_size=1,
    max_size=12,
)


def _prompt(index: int, arrival: Arrival) -> list[int]:
    shared = [
        100 * (segment + 1) + at
        for segment in arrival.segments
        for at in range(SEGMENT_LENGTHS[segment])
    ]
    return [*shared, *range(1000 * (index + 1), 1000 * (index + 1) + arrival.own)]


def _play(engine: FakeEngine, arrivals: list[Arrival], *, lossy: bool = False) -> None:
    """Arrivals and cancellations at their turns, then everything to its end."""
    due: list[tuple[int, R]] = []
    for index, arrival in enumerate(arrivals):
        request = engine.submit(f"r{index}", _prompt(index, arrival))
        if arrival.cancel_after is not None:
            due.append((len(engine.log) + arrival.cancel_after, request))
        for _ in range(arrival.turns):
            engine.turn()
            _cancel_due(engine, due, lossy)
    while engine.turn() is not None:
        _cancel_due(engine, due, lossy)
    engine.drain()


def _cancel_due(engine: FakeEngine, due: list[tuple[int, R]], lossy: bool) -> None:
    for at, request in list(due):
        if at <= len(engine.log):
            due.remove((at, request))
            if request in engine.prompts:
                (engine.fail if lossy else engine.cancel)(request)


@given(ARRIVALS, st.integers(1, 4), st.sampled_from([5, 16, 64]), st.booleans())
@settings(max_examples=200, deadline=None)
def test_every_prompt_token_is_computed_once_whatever_arrives_and_leaves(
    arrivals: list[Arrival], max_rows: int, prefill_chunk: int, lasting: bool
) -> None:
    engine = FakeEngine(max_rows=max_rows, prefill_chunk=prefill_chunk, output=5, lasting=lasting)
    _play(engine, arrivals)
    assert max(engine.computed.values(), default=1) == 1


@given(ARRIVALS, st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_what_is_computed_twice_is_less_than_the_minimum_per_request(
    arrivals: list[Arrival], max_rows: int
) -> None:
    engine = FakeEngine(max_rows=max_rows, minimum_shared=MINIMUM_SHARED_TOKENS)
    _play(engine, arrivals)
    twice = sum(engine.computed.values()) - len(engine.computed)
    assert twice <= (MINIMUM_SHARED_TOKENS - 1) * len(arrivals)


@given(ARRIVALS, st.integers(1, 4), st.booleans(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_nobody_is_left_behind_when_leaders_fail_or_the_cache_takes_nothing(
    arrivals: list[Arrival], max_rows: int, refuses: bool, lasting: bool
) -> None:
    engine = FakeEngine(max_rows=max_rows, refuses=refuses, lasting=lasting)
    _play(engine, arrivals, lossy=True)
    assert engine.scheduler.next() is None


@given(ARRIVALS)
@settings(max_examples=30, deadline=None)
def test_the_same_arrivals_give_the_same_work(arrivals: list[Arrival]) -> None:
    first, second = FakeEngine(max_rows=3), FakeEngine(max_rows=3)
    second.lane = first.lane
    _play(first, arrivals)
    _play(second, arrivals)
    assert first.log == second.log


def test_a_long_queue_is_not_gone_through_at_every_change() -> None:
    looked_up = 0

    def known(tokens: Tokens, namespace: str, alternatives: int | None) -> int:
        nonlocal looked_up
        looked_up += 1
        return 0

    lane = FakeLane(4, 64)
    scheduler = Scheduler(
        known, max_rows=4, clock=lambda: 0.0, computed=lambda request: np.array([], np.uint32)
    )
    requests = [R(f"r{number}") for number in range(400)]
    for number, request in enumerate(requests):
        tokens = np.array([number] * 20, np.uint32)
        scheduler.submit(request, tokens, "shared", max_tokens=1, lane=lane)
    for request in requests:
        assert scheduler.next() == Admit(request, False)
        scheduler.admitted(request, 19)
        if scheduler.statistics().decoding == 4:
            assert scheduler.next() == Decode(lane)
            for row in requests[requests.index(request) - 3 : requests.index(request) + 1]:
                scheduler.ended(row)
    assert looked_up <= 20 * len(requests)


class AskedEngine(FakeEngine):
    """Counts how often memory is asked for a prompt."""

    asked_for = 0

    def known(self, tokens: Tokens, namespace: str, alternatives: int | None = None) -> int:
        self.asked_for += 1
        return super().known(tokens, namespace, alternatives)


def test_memory_is_not_asked_about_prompts_that_nobody_computes_a_part_of() -> None:
    engine = AskedEngine(max_rows=4)
    for number in range(60):
        engine.submit(f"r{number}", [1000 + number] * 20)
    engine.drain()
    # Once for each, when it is admitted.
    assert engine.asked_for == 60
