"""How a row chooses its next token: its own settings, and randomness without state.

The key of token `index` is a function of (seed, index) alone, so a sequence does not depend on what
runs beside it and can be continued anywhere.
"""

import itertools
import secrets
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, greedy_sampler

from ..cache.prefix_hash import Tokens, as_tokens
from ..sampling import Sampling
from .penalties import Penalties, note, penalise, penalties_of

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


class SpecialTokens(NamedTuple):
    """Token ids of a model: `ends` end its output, `kept` are never left out by xtc."""

    ends: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()


class DrawSettings(NamedTuple):
    """How a token is drawn from log-probabilities, the same for many rows."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    xtc_probability: float
    xtc_threshold: float
    kept: tuple[int, ...] = ()


NO_TOKENS = as_tokens([])
NONE_SPECIAL = SpecialTokens()
GREEDY = DrawSettings(0.0, 1.0, 0, 0.0, 0.0, 0.0)


class RowSampler:
    """Chooses the tokens of one row, in order; `index` is the output token that comes next.

    In a batch of ours `sample` does it; in mlx-lm's, `process` is the row's logits processor, and a
    call with log-probabilities [1, vocabulary] gives token ids [1]. An error in here must not end
    the step of all rows: it is kept in `error` and the greedy token stands in.
    """

    def __init__(
        self,
        sampling: Sampling,
        seed: int,
        index: int = 0,
        *,
        penalties: Penalties | None = None,
        kept: tuple[int, ...] = (),
    ) -> None:
        self.settings = draw_settings(sampling, kept)
        self.seed = seed
        self.index = index
        self.penalties = penalties
        self.error: Exception | None = None

    @property
    def key(self) -> Hashable:
        """Rows for which it is equal can be sampled in one call."""
        return self.settings, self.penalties and self.penalties.rules

    def rewind(self, tokens: Tokens, index: int) -> None:
        """Go on after `tokens`, prompt and output, with output token `index`: what was chosen later
        is chosen again.
        """
        self.index = index
        if self.penalties is not None:
            self.penalties.rewind(tokens)

    def process(self, _: Any, logits: mx.array) -> mx.array:
        """The logits [1, vocabulary] after bias and penalties; what is handed in stays as it is."""
        try:
            return logits if self.penalties is None else penalise(logits, [self.penalties])
        except Exception as error:  # belongs to this row alone
            self.error = error
            return logits

    def __call__(self, logprobs: mx.array) -> mx.array:
        seed = fold(self.seed, self.index)
        self.index += 1
        try:
            token = self._choose(logprobs, seed)
            if self.penalties is not None:
                note(token, [self.penalties])
        except Exception as error:  # belongs to this row alone
            self.error = error
            token = mx.argmax(logprobs, axis=-1)
        return token

    def _choose(self, logprobs: mx.array, seed: int) -> mx.array:
        return draw(self.settings, logprobs, [seed])


def draw_settings(sampling: Sampling, kept: tuple[int, ...] = ()) -> DrawSettings:
    """What of the settings matters when a token is drawn; equal where that gives the same."""
    if sampling.temperature < GREEDY_BELOW:
        return GREEDY
    probability, threshold = sampling.xtc_probability, sampling.xtc_threshold
    xtc = (probability, threshold, kept) if probability else (0.0, 0.0, ())
    return DrawSettings(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, *xtc)


def draw(settings: DrawSettings, logprobs: mx.array, seeds: Sequence[int]) -> mx.array:
    """One token for each row of log-probabilities [rows, vocabulary], with a seed each.

    The filters of mlx-lm in the order of its `make_sampler`, then the largest of the scaled
    log-probabilities with Gumbel noise, whose key alone decides what a row gets.
    """
    if settings == GREEDY:
        return mx.argmax(logprobs, axis=-1)
    if settings.top_p < 1.0:
        logprobs = apply_top_p(logprobs, settings.top_p)
    if settings.min_p > 0.0:
        logprobs = apply_min_p(logprobs, settings.min_p)
    if settings.xtc_probability > 0.0:
        logprobs = _apply_xtc(settings, logprobs, seeds)
    if 0 < settings.top_k < logprobs.shape[-1]:
        logprobs = apply_top_k(logprobs, settings.top_k)
    shape = logprobs.shape[-1:]
    keys = mx.array([divmod(seed, 1 << 32) for seed in seeds], mx.uint32)
    noise = mx.vmap(lambda key: mx.random.gumbel(shape, key=key))(keys)
    return mx.argmax(logprobs * (1 / settings.temperature) + noise, axis=-1)


def draws_xtc(settings: DrawSettings, seed: int) -> bool:
    """Whether xtc takes part in the draw of a token with this seed; it has its own randomness."""
    return mix(seed ^ _GOLDEN) < settings.xtc_probability * (_MASK + 1)


def sample(logits: mx.array, samplers: Sequence[Any]) -> mx.array:
    """The next tokens [rows] of rows with logits [rows, vocabulary], each by its own sampler.

    Rows of equal settings are drawn in one call; what a row gets does not depend on the others.
    """
    tokens = mx.argmax(logits, axis=-1)
    alike: dict[Hashable, list[int]] = {}
    for row, sampler in enumerate(samplers):
        if isinstance(sampler, RowSampler):
            alike.setdefault(sampler.key, []).append(row)
    for rows in alike.values():
        everybody = len(rows) == len(samplers)
        chosen = logits if everybody else logits[mx.array(rows)]
        drawn = _sample_alike(chosen, [samplers[row] for row in rows])
        tokens = drawn if everybody else put_tokens(tokens, rows, drawn)
    return tokens


def put_tokens(tokens: mx.array, rows: Sequence[int], chosen: mx.array) -> mx.array:
    """The tokens of a step, with others in the places of some rows."""
    return mx.put_along_axis(tokens, mx.array(list(rows)), chosen.astype(tokens.dtype), axis=0)


def sampler_for(
    sampling: Sampling,
    seeds: SeedSource,
    *,
    prompt: Tokens = NO_TOKENS,
    max_tokens: int = 0,
    special: SpecialTokens = NONE_SPECIAL,
) -> Any:
    """The sampler of one row with at most `max_tokens` of output: mlx-lm's greedy one, shared by
    all greedy rows without penalties, or its own.
    """
    penalties = penalties_of(sampling, prompt, max_tokens=max_tokens, ends=special.ends)
    if sampling.temperature < GREEDY_BELOW and penalties is None:
        return greedy_sampler
    seed = seeds.next() if sampling.seed is None else sampling.seed
    return RowSampler(sampling, seed, penalties=penalties, kept=special.kept)


def _sample_alike(logits: mx.array, samplers: Sequence[RowSampler]) -> mx.array:
    """The tokens of rows with equal keys."""
    if len(samplers) > 1:
        with suppress(Exception):  # then each on its own, to see whose error it is
            return _sample_together(logits, samplers)
    return mx.concatenate(
        [_sample_alone(logits[row : row + 1], each) for row, each in enumerate(samplers)]
    )


def _sample_together(logits: mx.array, samplers: Sequence[RowSampler]) -> mx.array:
    penalties = [each.penalties for each in samplers if each.penalties is not None]
    settings = samplers[0].settings
    if penalties:
        logits = penalise(logits, penalties)
    seeds = [fold(each.seed, each.index) for each in samplers]
    tokens = draw(settings, _normalised(settings, logits), seeds)
    if penalties:
        note(tokens, penalties)
    for each in samplers:
        each.index += 1
    return tokens


def _sample_alone(logits: mx.array, sampler: RowSampler) -> mx.array:
    logits = sampler.process(None, logits)
    return sampler(_normalised(sampler.settings, logits))


def _normalised(settings: DrawSettings, logits: mx.array) -> mx.array:
    """The log-probabilities [rows, vocabulary], where a draw needs them."""
    if settings == GREEDY:
        return logits
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _apply_xtc(settings: DrawSettings, logprobs: mx.array, seeds: Sequence[int]) -> mx.array:
    """As mlx-lm's, which has one random number for all rows, and that from MLX's own state."""
    chances = mx.softmax(logprobs, axis=-1)
    likely = mx.where(chances > settings.xtc_threshold, chances, mx.inf)
    left_out = chances > likely.min(axis=-1, keepdims=True)
    if settings.kept:
        columns = mx.broadcast_to(mx.array(settings.kept)[None], (len(seeds), len(settings.kept)))
        left_out = mx.put_along_axis(left_out, columns, mx.array(False), axis=-1)
    drawn = mx.array([draws_xtc(settings, seed) for seed in seeds])[:, None]
    return mx.where(left_out & drawn, -mx.inf, logprobs)
