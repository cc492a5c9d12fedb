"""How the next token is chosen: the settings of a request, no MLX."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from .checks import check_kind, check_range, check_whole
from .errors import InvalidRequest

MAX_BIAS = 100.0
MAX_BIASED = 1024
MAX_PENALTY = 100.0
PENALTIES = ("repetition", "presence", "frequency")


class Sampling(Struct, frozen=True, kw_only=True):
    """How the next token is chosen: the settings of mlx-lm, with its meaning of each.

    First the logits are changed, whatever the temperature. `logit_bias` is added to the tokens that
    it names. `repetition_penalty` divides the logits of tokens that occur in the last
    `repetition_context_size` tokens (multiplies them below zero; 1 is off, and so is 0);
    `presence_penalty` is subtracted from them once, `frequency_penalty` for every occurrence, each
    with a context of its own. Prompt and output count alike; a context of 0 is all of both.

    Then a token is drawn. Temperature 0 takes the best one; else `top_p`, `min_p`, xtc and `top_k`
    choose who takes part, in this order. With `xtc_probability` all tokens but the least likely of
    those above `xtc_threshold` are left out of a draw; line breaks and ends never are. `seed` fixes
    the whole sequence whatever else runs beside it; without one, each request draws its own.

    Before `min_tokens` of output neither the model nor a stop string ends it.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    seed: int | None = None
    logit_bias: Mapping[int, float] = {}
    repetition_penalty: float = 1.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    presence_context_size: int = 20
    frequency_penalty: float = 0.0
    frequency_context_size: int = 20
    min_tokens: int = 0

    def validate(self) -> None:
        """Raise `InvalidRequest` for a value of a wrong kind or outside its range, NaN included."""
        check_range("temperature", self.temperature, 0.0, 100.0)
        check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_range("min_p", self.min_p, 0.0, 1.0)
        check_whole("top_k", self.top_k, 0, "0 (off) or more")
        check_range("xtc_probability", self.xtc_probability, 0.0, 1.0)
        check_range("xtc_threshold", self.xtc_threshold, 0.0, 0.5)
        if self.seed is not None:
            check_kind("seed", self.seed, int, "a whole number")
        self._check_penalties()
        _check_bias(self.logit_bias)
        check_whole("min_tokens", self.min_tokens, 0, "0 or more")

    def _check_penalties(self) -> None:
        if isinstance(self.repetition_penalty, bool) or self.repetition_penalty != 0:
            check_range("repetition_penalty", self.repetition_penalty, 0.01, MAX_PENALTY)
        check_range("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        check_range("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        for name in PENALTIES:
            size = f"{name}_context_size"
            check_whole(size, getattr(self, size), 0, "0 (all tokens) or more")


def _check_bias(biases: Any) -> None:
    check_kind("logit_bias", biases, Mapping, "a mapping of token ids to numbers")
    if len(biases) > MAX_BIASED:
        raise InvalidRequest(
            f"logit_bias has {len(biases):,} tokens; up to {MAX_BIASED:,} are taken"
        )
    for token, bias in biases.items():
        check_kind("a token in logit_bias", token, int, "a token id")
        if token < 0:
            raise InvalidRequest(
                f"logit_bias has the token {token}; token ids are 0 or more", "logit_bias"
            )
        check_range(f"the bias of token {token}", bias, -MAX_BIAS, MAX_BIAS)
