"""Rates from arrivals."""

import pytest

from bench.rates import Arrival, decode_rate, job_rate, prefill_rate

TWO_ROWS = [
    Arrival(0, 1.0),
    Arrival(0, 2.0),
    Arrival(1, 2.5),
    Arrival(0, 3.5),
    Arrival(1, 3.5),
    Arrival(0, 4.5),
    Arrival(1, 4.5, tokens=2),
    Arrival(1, 5.0),
]


def test_prefill_ends_with_the_last_rows_first_token() -> None:
    assert prefill_rate(100, TWO_ROWS) == 40.0


def test_decode_is_measured_while_all_rows_decode() -> None:
    assert decode_rate(TWO_ROWS) == 5 / 2.0


def test_one_row_decodes_from_its_first_token_to_its_last() -> None:
    assert decode_rate([Arrival(0, 1.0), Arrival(0, 1.5), Arrival(0, 2.0)]) == 2.0


def test_a_job_runs_from_its_submission_to_its_last_token() -> None:
    assert job_rate(TWO_ROWS) == 9 / 5.0


def test_rows_that_never_met_have_no_decode_rate() -> None:
    arrivals = [Arrival(0, 1.0), Arrival(0, 2.0), Arrival(1, 3.0), Arrival(1, 4.0, tokens=3)]
    with pytest.raises(ValueError, match="2 rows of 2 to 4 tokens were never decoded side by side"):
        decode_rate(arrivals)
