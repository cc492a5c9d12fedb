"""Deadlines: the next one first, those that were discarded forgotten."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_swarm.broker.engine.deadlines import FEW, Deadlines
from mlx_swarm.broker.engine.work import Expire
from mlx_swarm.broker.request import RequestId as R
from tests.engine.scheduling import FakeEngine


@given(st.lists(st.tuples(st.integers(0, 12), st.floats(0, 100), st.booleans()), max_size=80))
@settings(deadline=None)
def test_the_next_deadline_is_the_earliest_of_those_that_are_open(
    steps: list[tuple[int, float, bool]],
) -> None:
    deadlines, oracle = Deadlines(), dict[R, float]()
    for number, time, adds in steps:
        request = R(f"r{number}")
        if adds and request not in oracle:
            deadlines.add(request, time)
            oracle[request] = time
        else:
            deadlines.discard(request)
            oracle.pop(request, None)
        assert len(deadlines) == len(oracle)
        found = deadlines.next()
        assert (found and found[0]) == min(oracle.values(), default=None)
        assert found is None or oracle[found[1]] == found[0]
        assert len(deadlines._heap) <= 2 * len(oracle) + FEW


LIVES = st.lists(
    st.tuples(st.integers(1, 60), st.none() | st.integers(1, 40), st.integers(0, 5)),
    min_size=1,
    max_size=12,
)


@given(LIVES, st.integers(1, 3), st.sampled_from([80, 1 << 30]))
@settings(deadline=None)
def test_who_is_past_its_deadline_ends_at_once_whatever_its_state(
    lives: list[tuple[int, int | None, int]], rows: int, room: int
) -> None:
    engine = FakeEngine(max_rows=rows, prefill_chunk=16, turn_seconds=1.0, room=room, output=9)
    due: dict[R, float] = {}

    def turn() -> bool:
        work = engine.turn()
        for request, time in due.items():
            if request in engine.prompts and time <= engine.now:
                # One at a time, before anything else is done.
                assert isinstance(work, Expire)
        return work is not None

    for number, (length, deadline, turns) in enumerate(lives):
        tokens = [*range(30), *([1000 + number] * length)]
        request = engine.submit(f"r{number}", tokens, deadline=deadline)
        if deadline is not None:
            due[request] = engine.now + deadline
        for _ in range(turns):
            turn()
    while turn():
        pass
    engine.drain()
    expired = {work.request for work in engine.works(Expire)}
    assert expired <= due.keys()
    for number in range(len(lives)):
        request = R(f"r{number}")
        assert (engine.decoded[request] == engine.output) == (request not in expired)
    assert engine.scheduler.next_deadline() is None
