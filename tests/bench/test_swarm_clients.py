"""What is made of when tokens arrived, and what clients raise."""

import pytest

from bench.rates import Arrival
from bench.swarm_clients import (
    Job,
    Outcome,
    Sample,
    brokered,
    median_by,
    memory_of,
    rows_that_fit,
    spread,
)
from bench.swarm_setup import Setup, prepare
from mlx_swarm.broker.errors import ContextOverflow
from tests.bench.tiny_swarm import TINY

JOBS = [Job([1, 2], 3, at=0.5), Job([3], 2)]
OUTCOME = Outcome(
    JOBS,
    [Arrival(1, 0.25), Arrival(0, 1.5), Arrival(1, 2.0), Arrival(0, 4.0, tokens=2)],
    3,
    Sample(0),
)


@pytest.fixture(scope="module")
def setup() -> Setup:
    return prepare(TINY.model, TINY.dtype, ram=TINY.ram, copies=10_000_000)


def test_a_row_waits_from_its_own_arrival() -> None:
    assert OUTCOME.waits == [0.25, 1.0]


def test_gaps_are_between_tokens_of_one_row() -> None:
    assert OUTCOME.gaps == [1.75, 2.5]
    assert (OUTCOME.total, OUTCOME.tokens) == (4.0, 5)


def test_rows_that_never_meet_have_no_rate() -> None:
    apart = OUTCOME._replace(arrivals=[Arrival(0, 1.0), Arrival(1, 2.0)])
    assert apart.decode_rate == 0.0


def test_percentiles_and_the_run_in_the_middle() -> None:
    assert spread([1.0, 3.0, 2.0]).p50 == 2.0
    assert spread([1.0, 3.0, 2.0]).worst == 3.0
    ends = [OUTCOME._replace(arrivals=[Arrival(0, at)]) for at in (3.0, 1.0, 2.0)]
    assert median_by(ends, lambda outcome: outcome.total) == 2


def test_without_a_broker_there_is_no_account() -> None:
    memory = memory_of(OUTCOME._replace(running=Sample(5000)), 2000)
    assert (memory.running, memory.transients, memory.ledger) == (3000, 3000, {})


def test_mlx_lm_gets_as_many_rows_as_fit(setup: Setup) -> None:
    size = setup.kv_bytes(100)
    jobs = [Job([1] * 90, 10)] * 8
    fitting = setup._replace(copies=3 * 13 * size // 4)
    assert rows_that_fit(fitting, jobs) == 3
    assert rows_that_fit(setup._replace(copies=size), jobs) == 0
    assert rows_that_fit(setup._replace(copies=100 * size), jobs) == 8


def test_what_one_job_raises_ends_all(setup: Setup) -> None:
    with brokered(setup, max_rows=2) as clients, pytest.raises(ContextOverflow):
        clients.run([Job([5] * 20, 4), Job([5] * 5000, 4)])
