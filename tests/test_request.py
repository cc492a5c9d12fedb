"""What a request may ask for, seen without a model."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_swarm.broker import InvalidRequest, Request

anything = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)


@given(st.booleans() | anything, st.integers(-3, 25) | anything)
def test_log_probabilities_are_asked_for_in_range_or_refused(logprobs: Any, top: Any) -> None:
    request = Request(text="a", logprobs=logprobs, top_logprobs=top)
    is_valid = isinstance(logprobs, bool) and type(top) is int and 0 <= top <= 20 * logprobs
    if is_valid:
        request.validate()
        return
    with pytest.raises(InvalidRequest, match=r"^(top_)?logprobs is "):
        request.validate()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprobs": True, "top_logprobs": 21}, r"top_logprobs is 21; it must be in \[0, 20\]"),
        ({"logprobs": True, "top_logprobs": -1}, r"top_logprobs is -1; it must be in \[0, 20\]"),
        ({"top_logprobs": 5}, "top_logprobs is 5; it needs logprobs=True"),
        ({"logprobs": 1}, "logprobs is 1; it must be True or False"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs is True; .* a whole number"),
    ],
)
def test_what_is_refused_is_named_with_the_numbers(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Request(text="a", **fields).validate()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"priority": 11}, r"priority is 11; it must be in \[-10, 10\]"),
        ({"priority": -11}, r"priority is -11; it must be in \[-10, 10\]"),
        ({"priority": True}, "priority is True; it must be a whole number"),
        ({"priority": 0.5}, "priority is 0.5; it must be a whole number"),
        ({"deadline": 0}, r"deadline is 0; it must be in \(0, 1e\+06\]"),
        ({"deadline": float("nan")}, "deadline is nan; "),
        ({"deadline": float("inf")}, "deadline is inf; "),
        ({"deadline": "soon"}, "deadline is 'soon'; it must be a number"),
    ],
)
def test_a_priority_or_deadline_out_of_range_is_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Request(text="a", **fields).validate()


@given(st.integers(-10, 10), st.none() | st.integers(1, 10**6) | st.floats(1e-6, 1e6))
def test_priorities_and_deadlines_in_range_are_taken(priority: int, deadline: float | None) -> None:
    Request(text="a", priority=priority, deadline=deadline).validate()
