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
