"""Whom a request waits for, against going through everybody who computes."""

from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_swarm.broker.engine.entry import Entry, State
from mlx_swarm.broker.engine.leaders import Leaders
from tests.engine.scheduling import FakeEngine

Leader = tuple[Entry | None, int, bool]

NOBODY = None, 0, False


@pytest.fixture(autouse=True, scope="module")
def compared() -> Iterator[list[Leader]]:
    """Every choice of a leader is compared with the oracle's."""
    usual, seen = Leaders.best_for, list[Leader]()

    def chosen(
        leaders: Leaders, entry: Entry, prefilling: Iterable[Entry], decoding: Iterable[Entry]
    ) -> Leader:
        got = usual(leaders, entry, prefilling, decoding)
        expected = by_scan(leaders, entry, [*prefilling, *decoding])
        # Without a leader nobody asks how much memory has.
        assert got == expected or (got, expected[0], expected[2]) == (NOBODY, None, False)
        seen.append(got)
        return got

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Leaders, "best_for", chosen)
        yield seen


def by_scan(leaders: Leaders, entry: Entry, running: list[Entry]) -> Leader:
    """All who compute, one after the other."""
    best, longest = None, leaders._in_memory(entry)
    floor = longest
    for leader in running:
        if leader.state is State.DECODING and not leader.lane.donates:
            continue
        shared = leaders._shared(entry, leader)
        if shared > max(longest, leader.stored):
            best, longest = leader, shared
    return best, longest, longest - floor >= leaders._minimum_shared


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(0, 2), st.integers(0, 4)),
        min_size=2,
        max_size=16,
    ),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_the_leader_is_the_one_that_a_scan_finds(
    requests: list[tuple[int, int, int, int]], rows: int, lasting: bool, forgets: bool
) -> None:
    engine = FakeEngine(max_rows=rows, prefill_chunk=8, lasting=lasting)
    for number, (stem, length, branch, turns) in enumerate(requests):
        tokens = [stem] * length + [10 + branch] * (branch * 7) + [number + 100]
        engine.submit(f"r{number}", tokens, output=1 + branch)
        for _ in range(turns):
            engine.turn()
        if forgets and turns == 3:
            engine.memory.clear()
            engine.scheduler.memory_changed()
    engine.drain()


def test_leaders_were_found(compared: list[Leader]) -> None:
    assert any(leader is not None for leader, _, _ in compared)


def test_who_waits_long_remembers_no_more_than_twice_the_rows() -> None:
    engine = FakeEngine(max_rows=2)
    waiting = engine.submit("waiting", [2] * 5, priority=-1)
    for number in range(40):
        engine.submit(f"r{number}", [2, number + 10, 3])
    remembered = []
    while waiting in engine.scheduler._entries:
        remembered.append(len(engine.scheduler._entries[waiting].hopes))
        engine.turn()
    assert 2 < max(remembered) <= 2 * 2 + 2
