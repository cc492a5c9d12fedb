"""Chunks sized by time: bounded, by the latest speeds, and fixed where that is asked for."""

from hypothesis import given
from hypothesis import strategies as st

from mlx_swarm.broker.engine.pace import (
    FREE_SECONDS,
    GAP,
    LEAST,
    LEAST_CUDA,
    LONGEST,
    SLACK,
    Pace,
)

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
    assert pace.chunk(decoding=False) == LONGEST <= 30_000 * FREE_SECONDS
    affordable = 30_000 * (GAP - 1) * 0.008
    assert affordable / 2 < pace.chunk(decoding=True) == 512 <= affordable * SLACK


def test_a_slow_device_computes_little_between_steps() -> None:
    pace = Pace(512)
    pace.note_step(0.2)
    pace.note_prefill(512, 4.0)
    assert pace.chunk(decoding=True) == 64
    assert pace.chunk(decoding=False) == 512


def test_a_device_that_prepares_for_new_lengths_does_not_come_down_to_many_small_chunks() -> None:
    pace = Pace(512, least=LEAST_CUDA)
    for _ in range(20):
        tokens = pace.chunk(decoding=True)
        pace.note_step(0.008)
        pace.note_prefill(tokens, 0.05 + tokens / 30_000)
    assert pace.chunk(decoding=True) == LEAST_CUDA


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 10_000), SECONDS)))
def test_chunks_are_bounded_powers_of_two_whatever_was_measured(
    notes: list[tuple[bool, int, float]],
) -> None:
    pace = Pace(512)
    for is_step, tokens, seconds in notes:
        if is_step:
            pace.note_step(seconds)
        else:
            pace.note_prefill(tokens, seconds)
        for decoding in (True, False):
            assert LEAST <= pace.chunk(decoding=decoding) <= LONGEST
            assert pace.chunk(decoding=decoding).bit_count() == 1
