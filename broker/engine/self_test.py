"""Does a model read our caches rightly? Asked once when it is loaded, with a tiny prompt.

A model that computes on keys or values itself, or that calls another attention than the seam's,
fails; it then gets stock cache objects filled from the prompt cache: correct, but each row holds
its own copy of the prefix.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from msgspec import Struct

from ..cache import kinds
from . import attention

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)
SUFFIX = (5, 8, 9)
DECODED = (7, 9)

FLOOR = {mx.float32: 1e-3, mx.float16: 2e-2, mx.bfloat16: 6e-2}
"""Allowed difference, as a part of the logits' size, where the model itself shows no noise."""
NOISE = 4
"""Allowed difference, in units of what stock caches show between one piece and many."""


class SelfTest(Struct, frozen=True):
    """The verdict; `reason` is empty if it passed.

    `error` and `tolerance` are root mean squares of differences of logits.
    """

    passed: bool
    reason: str = ""
    error: float = 0.0
    tolerance: float = 0.0

    def usable(self, clones: Sequence[Any]) -> list[Any]:
        """The clones themselves, or stock copies of them for a model that failed."""
        return list(clones) if self.passed else kinds.materialise(clones)


def self_test(model: Any) -> SelfTest:
    """Install the seam and compare the model's logits on clones with those on stock caches.

    The clones continue a prompt by several tokens and then by single ones. Never raises for what
    the model does.
    """
    attention.install(model)
    dtype = model(mx.array([PROMPT])).dtype
    expected, noise, caches = _stock_run(model)
    try:
        layout = kinds.layout_of(caches)
        extent = kinds.seal(caches, layout, 0, len(PROMPT))
        span = extent.whole()
        checkpoint = kinds.snapshot(caches, layout)
        clones = kinds.clone(layout, [span], checkpoint, len(PROMPT))
        got = _continue(model, clones)
    except Exception as error:  # any failure at all means: this model cannot use clones
        return SelfTest(False, f"{type(error).__name__}: {error}")
    tolerance = max(NOISE * noise, FLOOR.get(dtype, 2e-2) * size(expected))
    error_size = size(got - expected)
    if not error_size <= tolerance:
        reason = f"logits differ by {error_size:.3g}, at most {tolerance:.3g} is allowed"
        return SelfTest(False, reason, error_size, tolerance)
    return SelfTest(True, "", error_size, tolerance)


def _stock_run(model: Any) -> tuple[mx.array, float, list[Any]]:
    """Logits after the prompt, their noise, and stock caches that hold just the prompt."""
    caches, continued = make_prompt_cache(model), make_prompt_cache(model)
    _logits(model, PROMPT, caches)
    _logits(model, PROMPT, continued)
    expected = _continue(model, continued)
    in_one_piece = _logits(model, PROMPT + SUFFIX + DECODED, make_prompt_cache(model))
    return expected, size(in_one_piece[len(PROMPT) :] - expected), caches


def _continue(model: Any, caches: list[Any]) -> mx.array:
    logits = [_logits(model, SUFFIX, caches)]
    logits += [_logits(model, (token,), caches) for token in DECODED]
    return mx.concatenate(logits)


def _logits(model: Any, tokens: Sequence[int], caches: list[Any]) -> mx.array:
    logits: mx.array = model(mx.array([tokens]), cache=caches)[0].astype(mx.float32)
    mx.eval(logits, [cache.state for cache in caches])
    return logits


def size(logits: mx.array) -> float:
    size = mx.sqrt(mx.square(logits).mean()).item()
    assert isinstance(size, float)
    return size
