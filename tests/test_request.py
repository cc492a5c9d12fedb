"""What a request may ask for, seen without a model."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_swarm.broker import Grammar, InvalidRequest, Request, Sampling

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
        ({"prompt_logprobs": 5}, "prompt_logprobs is 5; it must be True or False"),
        ({"prompt_logprobs": True, "top_logprobs": 5}, "5; it needs logprobs=True"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs is True; .* a whole number"),
    ],
)
def test_what_is_refused_is_named_with_the_numbers(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Request(text="a", **fields).validate()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"repetition_penalty": -1.0}, r"repetition_penalty is -1.0; it must be in \[0.01, 100\]"),
        ({"repetition_penalty": False}, "repetition_penalty is False; it must be a number"),
        ({"presence_penalty": 101}, r"presence_penalty is 101; it must be in \[-100, 100\]"),
        ({"frequency_penalty": math.nan}, "frequency_penalty is nan; it must be in"),
        ({"frequency_context_size": -2}, r"frequency_context_size is -2; it must be 0 \(all"),
        ({"repetition_context_size": 2.5}, "repetition_context_size is 2.5; .* a whole number"),
        ({"logit_bias": [(1, 2)]}, "logit_bias is .*; it must be a mapping"),
        ({"logit_bias": {"1": 2}}, "a token in logit_bias is '1'; it must be a token id"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "has 1,025 tokens; up to 1,024 are taken"),
        ({"logit_bias": {-1: 2}}, "logit_bias has the token -1"),
        ({"logit_bias": {7: math.inf}}, "the bias of token 7 is inf; it must be in"),
        ({"xtc_probability": 1.5}, r"xtc_probability is 1.5; it must be in \[0, 1\]"),
        ({"xtc_threshold": 0.6}, r"xtc_threshold is 0.6; it must be in \[0, 0.5\]"),
        ({"min_tokens": -1}, "min_tokens is -1; it must be 0 or more"),
        ({"min_tokens": 9}, "min_tokens is 9; max_tokens is 8, which is less"),
    ],
)
def test_sampling_out_of_range_is_refused_with_the_numbers(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Request(text="a", max_tokens=8, sampling=Sampling(**fields)).validate()


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar(), "a grammar is one of json_schema, regex, choice, lark; got none of them"),
        (Grammar(regex="a", lark="b"), "a grammar is one of .*; got regex and lark"),
        (Grammar(regex=5), "regex is 5; it must be text"),  # type: ignore[arg-type]
        (Grammar(lark="\ud800"), "lark has half a character"),
        (Grammar(regex="a" * (1 << 20) + "b"), "has 1,048,577 characters; up to 1,048,576"),
        (Grammar(choice="abc"), "choice is the text 'abc'; it must be a list"),
        (Grammar(choice=[]), "choice has 0 strings; give at least one"),
        (Grammar(choice=["a", ""]), "choice has 2 strings; give at least one, none of them empty"),
        (Grammar(choice=["a", 1]), "a choice is 1; it must be text"),  # type: ignore[list-item]
        (Grammar(json_schema={"a": {1}}), "json_schema is not JSON: .*set"),
        (Grammar(json_schema=[1]), "json_schema is .*; it must be a mapping"),  # type: ignore[arg-type]
        ("a*", "grammar is 'a\\*'; it must be a Grammar"),
    ],
)
def test_a_grammar_that_is_none_is_refused(grammar: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Request(text="a", grammar=grammar).validate()


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (Grammar(json_schema={"x-guidance": {}, "items": 3}), '{"x-guidance": {}, "items": 3}'),
        (Grammar(json_schema='{"x-guidance": {}}'), '{"x-guidance": {}}'),
        (Grammar(json_schema="true"), "true"),
        (Grammar(choice=("a", "é")), '["a", "\\u00e9"]'),
        (Grammar(regex=""), ""),
        (Grammar(lark="start: A"), "start: A"),
    ],
)
def test_a_grammar_has_one_text(grammar: Grammar, text: str) -> None:
    Request(text="a", grammar=grammar).validate()
    assert grammar.source().text == text


def test_what_mlx_lm_takes_is_taken() -> None:
    off = Sampling(repetition_penalty=0, presence_context_size=0, logit_bias={0: -100})
    on = Sampling(repetition_penalty=1.3, frequency_penalty=-2, xtc_probability=1, min_tokens=8)
    for sampling in (off, on):
        Request(text="a", max_tokens=8, sampling=sampling).validate()


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
