"""Samplers: each row's own settings and seed, randomness without state, errors kept."""

from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import apply_xtc, greedy_sampler

from mlx_swarm.broker.cache.prefix_hash import as_tokens
from mlx_swarm.broker.engine.sampling import (
    RowSampler,
    SeedSource,
    draw,
    draw_settings,
    draws_xtc,
    fold,
    mix,
    sample,
    sampler_for,
)
from mlx_swarm.broker.request import Sampling

VOCABULARY = 50


def _logprobs(seed: int = 0) -> mx.array:
    logits = mx.random.normal((1, VOCABULARY), key=mx.random.key(seed)) * 2
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _draw(sampler: RowSampler, count: int) -> list[int]:
    return [_id(sampler(_logprobs())) for _ in range(count)]


def _id(token: mx.array) -> int:
    return int(np.array(token).item())


def _state() -> list[int]:
    return [int(word) for word in np.array(mx.random.state[0])]  # type: ignore[index]


def test_default_seeds_are_never_equal() -> None:
    seeds = SeedSource(base=2**64 - 3)
    assert len({seeds.next() for _ in range(2000)}) == 2000
    assert SeedSource().next() != SeedSource().next()


@given(st.integers(-(2**70), 2**70), st.integers(0, 1000))
def test_every_token_of_every_seed_has_a_key_of_its_own(seed: int, index: int) -> None:
    assert fold(seed, index) != fold(seed, index + 1)
    assert 0 <= fold(seed, index) < 2**64
    assert mix(seed % 2**64) != mix((seed + 1) % 2**64)


def test_a_seed_fixes_the_sequence_wherever_it_is_continued() -> None:
    sampling = Sampling(temperature=1.0)
    whole = _draw(RowSampler(sampling, seed=7), 12)
    assert _draw(RowSampler(sampling, seed=7), 5) == whole[:5]
    assert _draw(RowSampler(sampling, seed=7, index=5), 7) == whole[5:]
    assert _draw(RowSampler(sampling, seed=8), 12) != whole


def test_mlx_s_own_random_state_neither_matters_nor_moves() -> None:
    mx.random.seed(1)
    before = _state()
    first = _draw(RowSampler(Sampling(temperature=1.0, top_p=0.9, min_p=0.01), seed=3), 6)
    assert _state() == before
    mx.random.seed(2)
    assert _draw(RowSampler(Sampling(temperature=1.0, top_p=0.9, min_p=0.01), seed=3), 6) == first


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=1.0, min_p=1.0),
        Sampling(temperature=1.0, top_p=1e-6),
        Sampling(temperature=1e-3),
    ],
)
def test_each_filter_alone_can_leave_only_the_best(sampling: Sampling) -> None:
    best = _id(mx.argmax(_logprobs()))
    assert _draw(RowSampler(sampling, seed=1), 5) == [best] * 5


def test_top_k_keeps_k_and_a_k_beyond_the_vocabulary_keeps_all() -> None:
    best = set(np.argsort(-np.array(_logprobs()[0]))[:3])
    assert set(_draw(RowSampler(Sampling(temperature=2.0, top_k=3), seed=1), 60)) == best
    assert len(set(_draw(RowSampler(Sampling(temperature=2.0, top_k=10**9), seed=1), 60))) > 3


def test_greedy_rows_share_one_sampler() -> None:
    seeds = SeedSource()
    assert sampler_for(Sampling(), seeds) is greedy_sampler
    assert sampler_for(Sampling(temperature=1e-9), seeds) is greedy_sampler
    own = sampler_for(Sampling(temperature=1.0, seed=5), seeds)
    assert isinstance(own, RowSampler)
    assert own.seed == 5


def test_an_error_is_kept_and_the_greedy_token_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = RowSampler(Sampling(temperature=1.0), seed=1)

    def broken(logprobs: mx.array, key: mx.array) -> mx.array:
        raise ValueError("broken")

    monkeypatch.setattr(sampler, "_choose", broken)
    assert _draw(sampler, 1) == [_id(mx.argmax(_logprobs()))]
    assert str(sampler.error) == "broken"


@pytest.mark.parametrize("vocabulary", [49, 50])
def test_a_batch_draws_for_each_row_what_the_row_alone_would(vocabulary: int) -> None:
    """Greedy rows, rows of equal settings and one of its own, whatever stands beside them."""
    hot, cut = Sampling(temperature=1.0), Sampling(temperature=0.7, top_p=0.8, seed=9)
    wide, terse = Sampling(temperature=2.0, top_k=5), Sampling(presence_penalty=1.5)
    hot_terse = Sampling(temperature=1.0, repetition_penalty=1.3, logit_bias={3: 2.0})
    wanted = [hot, Sampling(), hot, cut, hot, cut, wide, terse, hot_terse, terse, hot_terse]
    logits = mx.random.normal((len(wanted), vocabulary), key=mx.random.key(3)) * 2

    def samplers() -> list[Any]:
        return [
            sampler_for(
                msgspec.structs.replace(each, seed=row),
                SeedSource(),
                prompt=as_tokens([row, 3]),
                max_tokens=8,
            )
            for row, each in enumerate(wanted)
        ]

    alone, together = samplers(), samplers()
    for _ in range(3):
        expected = [
            _id(sample(logits[row : row + 1], [sampler])) for row, sampler in enumerate(alone)
        ]
        assert np.array(sample(logits, together)).tolist() == expected
    assert [sampler.index for sampler in together if isinstance(sampler, RowSampler)] == [3] * 10


@settings(deadline=None)
@given(st.floats(0.05, 1.0), st.sampled_from([0.0, 0.03, 0.2]), st.integers(0, 1 << 32))
def test_xtc_leaves_out_what_mlx_lm_s_does_for_each_row_by_its_own_chance(
    probability: float, threshold: float, first: int
) -> None:
    sampling = Sampling(
        temperature=1.0, xtc_probability=probability, xtc_threshold=threshold, min_p=0.0
    )
    drawing = draw_settings(sampling, (4, 9))
    logprobs = mx.concatenate([_logprobs(first), _logprobs(first + 1)])
    for seeds in ([fold(first, 0), fold(first, 1)], [first, first + 1]):
        rows = []
        for row, seed in enumerate(seeds):
            one = logprobs[row : row + 1]
            if draws_xtc(drawing, seed):
                one = apply_xtc(one, 1.0, threshold, [4, 9])
            rows.append(_id(draw(draw_settings(Sampling(temperature=1.0)), one, [seed])))
        assert np.array(draw(drawing, logprobs, seeds)).tolist() == rows


def test_xtc_takes_part_as_often_as_asked() -> None:
    for probability in (0.0, 0.25, 1.0):
        sampling = Sampling(temperature=1.0, xtc_probability=probability)
        drawing = draw_settings(sampling)
        drawn = sum(draws_xtc(drawing, fold(5, index)) for index in range(4000))
        assert abs(drawn / 4000 - probability) < 0.03
