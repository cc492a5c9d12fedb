"""Bias and penalties: mlx-lm's results to the last bit, alone and beside others."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_logits_processors

from mlx_swarm.broker.cache.prefix_hash import as_tokens
from mlx_swarm.broker.engine.penalties import Penalties, note, penalise, penalties_of
from mlx_swarm.broker.request import Sampling

VOCABULARY = 12
DTYPES = (mx.float32, mx.float16, mx.bfloat16)

values = st.sampled_from([0.0, 0.3, -0.7, 1.9])
sizes = st.sampled_from([0, 1, 3, 20, 10**9])
tokens = st.integers(0, VOCABULARY - 1)
samplings = st.builds(
    Sampling,
    logit_bias=st.dictionaries(tokens, st.floats(-5, 5, width=16), max_size=3),
    repetition_penalty=st.sampled_from([0.0, 1.0, 1.3, 0.6]),
    repetition_context_size=sizes,
    presence_penalty=values,
    presence_context_size=sizes,
    frequency_penalty=values,
    frequency_context_size=sizes,
)


def processed(sampling: Sampling, context: list[int], logits: mx.array) -> mx.array:
    """What mlx-lm makes of one row's logits."""
    names = ("repetition", "presence", "frequency")
    fields = [f"{name}_{what}" for name in names for what in ("penalty", "context_size")]
    arguments = {name: getattr(sampling, name) for name in fields}
    processors = make_logits_processors(dict(sampling.logit_bias), **arguments)
    row = logits[None] + 0  # they write into what they are given
    for processor in processors:
        row = processor(mx.array(context), row)
    return row[0]


def equal(found: mx.array, expected: mx.array) -> bool:
    """Whether two arrays are the same to the last bit."""
    assert found.dtype == expected.dtype
    return bool(mx.array_equal(found, expected).item())


@settings(deadline=None)
@given(
    samplings,
    st.lists(st.lists(tokens, min_size=1, max_size=30), min_size=1, max_size=4),
    st.sampled_from(DTYPES),
    st.data(),
)
def test_rows_of_equal_rules_get_what_mlx_lm_makes_of_each_alone(
    sampling: Sampling, prompts: list[list[int]], dtype: mx.Dtype, data: Any
) -> None:
    """Step by step with tokens that are not computed yet, while rows join and leave."""
    made = [penalties_of(sampling, as_tokens(p), max_tokens=8, ends=()) for p in prompts]
    rows = [(list(p), each) for p, each in zip(prompts, made, strict=True) if each is not None]
    waiting, taking_part = rows[1:], rows[:1]
    for step in range(6):
        if waiting and data.draw(st.booleans()):
            taking_part.append(waiting.pop())
        if len(taking_part) > 1 and data.draw(st.booleans()):
            taking_part.pop(data.draw(st.integers(0, len(taking_part) - 1)))
        if not taking_part:
            return
        logits = (mx.random.normal((4, VOCABULARY), key=mx.random.key(step)) * 3).astype(dtype)
        logits = logits[: len(taking_part)]
        for rules in {each.rules for _, each in taking_part}:
            alike = [row for row, (_, each) in enumerate(taking_part) if each.rules == rules]
            asked = [taking_part[row][1] for row in alike]
            before = mx.array(logits)
            found = penalise(logits[mx.array(alike)], asked)
            assert equal(logits, before)
            for at, row in enumerate(alike):
                assert equal(found[at], processed(sampling, taking_part[row][0], logits[row]))
            chosen = mx.argmax(found, axis=-1)
            note(chosen, asked)
            for row, token in zip(alike, np.array(chosen).tolist(), strict=True):
                taking_part[row][0].append(token)


def test_rows_that_ask_for_nothing_have_no_penalties() -> None:
    nothing = Sampling(repetition_penalty=1.0, presence_context_size=5, min_tokens=4)
    assert penalties_of(nothing, as_tokens([1]), max_tokens=8, ends=()) is None
    assert penalties_of(Sampling(), as_tokens([1]), max_tokens=8, ends=(2,)) is None


def test_no_end_is_chosen_before_min_tokens() -> None:
    sampling = Sampling(min_tokens=2)
    row = penalties_of(sampling, as_tokens([1]), max_tokens=8, ends=(2, 5))
    assert row is not None
    logits = mx.zeros((1, VOCABULARY), mx.bfloat16)
    for allowed in (False, False, True):
        found = np.array(penalise(logits, [row]).astype(mx.float32))[0]
        assert np.flatnonzero(np.isinf(found)).tolist() == ([] if allowed else [2, 5])
        note(mx.array([0]), [row])


def test_a_row_moves_only_where_another_joins_or_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    stack = mx.stack

    def counted(arrays: list[mx.array]) -> mx.array:
        moved.append(len(arrays))
        return stack(arrays)

    monkeypatch.setattr(mx, "stack", counted)
    made = [
        penalties_of(Sampling(presence_penalty=1.0), as_tokens([row]), max_tokens=8, ends=())
        for row in range(3)
    ]
    rows = [each for each in made if isinstance(each, Penalties)]
    logits = mx.zeros((3, VOCABULARY))
    for taking_part in (rows, rows, rows, rows[1:], rows[1:], rows[1:2], rows[1:2]):
        penalise(logits[: len(taking_part)], taking_part)
        note(mx.zeros((len(taking_part),), mx.uint32), taking_part)
    assert moved == [3, 2, 1]
