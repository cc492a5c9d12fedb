"""How a row chooses its next token: its own settings, and randomness without state.

The key of token `index` is a function of (seed, index) alone, so a sequence does not depend on what
runs beside it and can be continued anywhere.
"""

import itertools
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import mlx.core as mx
import msgspec
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, greedy_sampler

from ..request import Sampling

GREEDY_BELOW = 1e-4
"""Temperatures under this are greedy: their scaled logits would leave the range of float32."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(value: int) -> int:
    """A bijection of 64-bit integers that looks random (the finaliser of SplitMix64)."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def fold(seed: int, index: int) -> int:
    """The 64-bit seed of token `index`; different for every index of a seed."""
    return mix(mix(seed & _MASK) ^ index)


class SeedSource:
    """Default seeds: no two of one process are equal, whatever the clock says."""

    def __init__(self, base: int | None = None) -> None:
        self._base = secrets.randbits(64) if base is None else base
        self._counter = itertools.count()

    def next(self) -> int:
        """A seed that was not given out before (until 2**64 of them were)."""
        return mix(self._base + next(self._counter) & _MASK)


class RowSampler:
    """Chooses the tokens of one row, in order; `index` is the output token that comes next.

    Called with log-probabilities [1, vocabulary]; gives token ids [1]. An error in here must not
    end the step of all rows: it is kept in `error` and the greedy token stands in.
    """

    def __init__(self, sampling: Sampling, seed: int, index: int = 0) -> None:
        self.sampling = sampling
        self.seed = seed
        self.index = index
        self.error: Exception | None = None

    def __call__(self, logprobs: mx.array) -> mx.array:
        key = mx.random.key(fold(self.seed, self.index))
        self.index += 1
        try:
            return self._choose(logprobs, key)
        except Exception as error:  # belongs to this row alone
            self.error = error
            return mx.argmax(logprobs, axis=-1)

    def _choose(self, logprobs: mx.array, key: mx.array) -> mx.array:
        return draw(self.sampling, logprobs, key[None])


def draw(sampling: Sampling, logprobs: mx.array, keys: mx.array) -> mx.array:
    """One token for each row of log-probabilities [rows, vocabulary], with keys [rows, 2].

    The filters of mlx-lm in the order of its `make_sampler`, then the largest of the scaled
    log-probabilities with Gumbel noise, whose key alone decides what a row gets.
    """
    if sampling.top_p < 1.0:
        logprobs = apply_top_p(logprobs, sampling.top_p)
    if sampling.min_p > 0.0:
        logprobs = apply_min_p(logprobs, sampling.min_p)
    if 0 < sampling.top_k < logprobs.shape[-1]:
        logprobs = apply_top_k(logprobs, sampling.top_k)
    shape = logprobs.shape[-1:]
    noise = mx.vmap(lambda key: mx.random.gumbel(shape, key=key))(keys)
    return mx.argmax(logprobs * (1 / sampling.temperature) + noise, axis=-1)


def sample(logits: mx.array, samplers: Sequence[Any]) -> mx.array:
    """The next tokens [rows] of rows with logits [rows, vocabulary], each by its own sampler.

    Rows of equal settings are drawn in one call; what a row gets does not depend on the others.
    """
    greedy = mx.argmax(logits, axis=-1)
    alike: dict[Sampling, list[int]] = {}
    for row, sampler in enumerate(samplers):
        if isinstance(sampler, RowSampler):
            settings = msgspec.structs.replace(sampler.sampling, seed=None)
            alike.setdefault(settings, []).append(row)
    for settings, rows in alike.items():
        chosen = logits if len(rows) == len(samplers) else logits[mx.array(rows)]
        logprobs = chosen - mx.logsumexp(chosen, axis=-1, keepdims=True)
        drawn = _draw_alike(settings, logprobs, [samplers[row] for row in rows])
        greedy = drawn if len(rows) == len(samplers) else _put(greedy, rows, drawn)
    return greedy


def _draw_alike(settings: Sampling, logprobs: mx.array, samplers: Sequence[RowSampler]) -> mx.array:
    if len(samplers) > 1:
        with suppress(Exception):  # then each on its own, to see whose error it is
            seeds = [fold(sampler.seed, sampler.index) for sampler in samplers]
            keys = mx.array([divmod(seed, 1 << 32) for seed in seeds], mx.uint32)
            tokens = draw(settings, logprobs, keys)
            for sampler in samplers:
                sampler.index += 1
            return tokens
    return mx.concatenate(
        [sampler(logprobs[row : row + 1]) for row, sampler in enumerate(samplers)]
    )


def _put(tokens: mx.array, rows: Sequence[int], drawn: mx.array) -> mx.array:
    return mx.put_along_axis(tokens, mx.array(list(rows)), drawn.astype(tokens.dtype), axis=0)


def sampler_for(sampling: Sampling, seeds: SeedSource) -> Any:
    """The sampler of one row: mlx-lm's greedy one, shared by all greedy rows, or its own."""
    if sampling.temperature < GREEDY_BELOW:
        return greedy_sampler
    return RowSampler(sampling, seeds.next() if sampling.seed is None else sampling.seed)
