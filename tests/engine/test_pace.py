"""Chunks sized by time: bounded, by the latest speeds, and fixed where that is asked for."""

from hypothesis import given
from hypothesis import strategies as st

from mlx_swarm.broker.engine.pace import FREE_SECONDS, GAP, GRAIN, LONGEST, Pace

SECONDS = st.floats(1e-6, 1e3)


def test_what_is_asked_for_always_holds() -> None:
    pace = Pace(512, fixed=7)
    pace.note_prefill(1000, 0.001)
    pace.note_step(1.0)
    assert pace.chunk(decoding=True) == pace.chunk(decoding=False) == 7


def test_before_anything_is_known_chunks_are_of_the_first_size() -> None:
    assert Pace(512).chunk(decoding=True) == Pace(512).chunk(decoding=False) == 512


def test_a_fast_device_computes_much_at_once_and_little_between_steps() -> None:
    pace = Pace(512)
    for _ in range(4):
        pace.note_step(0.008)
        pace.note_prefill(512, 512 / 30_000 + 0.008)
    assert pace.chunk(decoding=False) == min(LONGEST, int(30_000 * FREE_SECONDS) // GRAIN * GRAIN)
    assert pace.chunk(decoding=True) == int(30_000 * (GAP - 1) * 0.008) // GRAIN * GRAIN > 0


def test_a_slow_device_computes_a_grain_between_steps() -> None:
    pace = Pace(512)
    pace.note_step(0.1)
    pace.note_prefill(512, 4.0)
    assert pace.chunk(decoding=True) == GRAIN
    assert pace.chunk(decoding=False) == 512


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 10_000), SECONDS)))
def test_chunks_are_bounded_whatever_was_measured(
    notes: list[tuple[bool, int, float]],
) -> None:
    pace = Pace(512)
    for is_step, tokens, seconds in notes:
        if is_step:
            pace.note_step(seconds)
        else:
            pace.note_prefill(tokens, seconds)
        for decoding in (True, False):
            assert GRAIN <= pace.chunk(decoding=decoding) <= LONGEST
            assert pace.chunk(decoding=decoding) % GRAIN == 0
