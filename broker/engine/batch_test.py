"""Can a model decode in our batch? Asked once when it is loaded, with a few tiny rows.

What cannot gets mlx-lm's batches, with a copy of the prefix for each row: correct, but dearer.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.sample_utils import greedy_sampler

from ..cache import kinds
from ..cache.layout import Layout, StateLeaf, TokenLeaf
from .batch_caches import Asked
from .decode_batch import DecodeBatch, PrefillLimits
from .rehearsal import rehearse
from .seat import Seat
from .self_test import FLOOR, NOISE, PROMPT, SelfTest, size
from .shared_attention import KERNEL, Implementation, warm_up
from .sharing import Piece

KERNEL_REST = 2048
PLAIN_REST = 256
"""Rests of prompts, in tokens, up to which many are computed together."""

SCORE_BYTES = 128 << 20
"""Bytes of the scores that one layer keeps at a time."""

COMMON = PROMPT + PROMPT
ROWS = ((*COMMON, 2, 7), (*COMMON, 8, 8, 1), (*COMMON, 5))
NEXT = 7


class BatchVerdict(NamedTuple):
    """`layout` is that of the model's caches if it passed, `attention` what serves its layers.

    `prefill` is what of prompts the batch computes. `fallback` is the layout, as far as it is
    known, where rows have caches of their own.
    """

    test: SelfTest
    layout: Layout | None = None
    attention: tuple[Implementation, ...] = ()
    prefill: PrefillLimits = PrefillLimits()
    fallback: Layout | None = None


def batch_test(model: Any, make_caches: Callable[[], list[Any]]) -> BatchVerdict:
    """Try the model, and compile what its decode steps need. Never raises for what it does."""
    layout = None
    try:
        dtype = model(mx.array([PROMPT])).dtype
        filled = [_filled(model, prompt, make_caches()) for prompt in ROWS]
        layout = kinds.layout_of(filled[0])
        reason = unsupported(layout)
        if reason:
            return BatchVerdict(SelfTest(False, reason), fallback=layout)
        got, asked = _batched(model, layout, filled)
        expected = mx.concatenate([_logits(model, (NEXT,), caches) for caches in filled])
        whole = [_logits(model, (*prompt, NEXT), make_caches()) for prompt in ROWS]
    except Exception as error:  # any failure at all means: this model cannot
        reason = f"{type(error).__name__}: {error}"
        return BatchVerdict(SelfTest(False, reason), fallback=layout)
    noise = size(mx.concatenate(whole) - expected)
    tolerance = max(NOISE * noise, FLOOR.get(dtype, 2e-2) * size(expected))
    error_size = size(got - expected)
    if not error_size <= tolerance:
        reason = f"logits differ by {error_size:.3g}, at most {tolerance:.3g} is allowed"
        return BatchVerdict(SelfTest(False, reason, error_size, tolerance), fallback=layout)
    passed = SelfTest(True, "", error_size, tolerance)
    served = [warm_up(each.geometry, sinks=each.sinks, window=each.window) for each in asked]
    limits = _prefill_limits(asked, served)
    if limits.tokens == KERNEL_REST and not layout.has_state:
        rehearse(model, layout, limits, [_common(filled, layout)], got.shape[-1])
    return BatchVerdict(passed, layout, tuple(sorted(set(served))), limits)


def unsupported(layout: Layout) -> str:
    """Why caches of this layout cannot decode in our batch; "" if they can."""
    for leaf in layout.leaves:
        if isinstance(leaf, StateLeaf):
            continue
        if leaf.bits or leaf.kind not in ("KVCache", "ConcatenateKVCache", "RotatingKVCache"):
            return f"{leaf.kind} is not batched"
        if leaf.retention.keep:
            return f"{leaf.kind} keeps its first {leaf.retention.keep} tokens"
        if len(set(leaf.planes)) != 1 or len(leaf.planes) != 2:
            return f"{leaf.kind} holds keys and values of different shapes"
    return ""


def _prefill_limits(asked: set[Asked], served: Sequence[Implementation]) -> PrefillLimits:
    """Plain operations keep the scores of all tokens, which kernels do not."""
    if all(each.name == KERNEL for each in served):
        return PrefillLimits(KERNEL_REST)
    heads = max((each.geometry.query_heads for each in asked), default=1)
    return PrefillLimits(PLAIN_REST, SCORE_BYTES // (4 * heads))


def _batched(
    model: Any, layout: Layout, filled: Sequence[list[Any]]
) -> tuple[mx.array, set[Asked]]:
    """Logits of one step of all rows, the first of them over one span where there is KV."""
    path: list[Piece] = []
    if any(isinstance(leaf, TokenLeaf) for leaf in layout.leaves):
        path = [_common(filled, layout)]
    batch = DecodeBatch(model, layout)
    for prompt, caches in zip(ROWS, filled, strict=True):
        seat = Seat(
            path,
            kinds.segments_of(caches),
            kinds.states_of(caches),
            length=len(prompt),
            token=NEXT,
            max_tokens=1,
            sampler=greedy_sampler,
        )
        batch.add(seat)
    logits, asked = batch.probe()
    return logits.astype(mx.float32), asked


def _common(filled: Sequence[list[Any]], layout: Layout) -> Piece:
    return Piece(kinds.seal(filled[0], layout, 0, len(COMMON)), 0, len(COMMON))


def _filled(model: Any, prompt: Sequence[int], caches: list[Any]) -> list[Any]:
    _logits(model, prompt, caches)
    return caches


def _logits(model: Any, tokens: Sequence[int], caches: list[Any]) -> mx.array:
    logits: mx.array = model(mx.array([tokens]), cache=caches)[:, -1, :]
    mx.eval(logits, [cache.state for cache in caches])
    return logits.astype(mx.float32)
