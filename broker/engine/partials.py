"""Attention over pieces of a sequence, and merging the pieces: plain operations, float32 inside.

Softmax attention over a concatenation is a weighted mean of the attentions over its parts, with
the weights exp(lse_i) / sum exp(lse_j). Sources: Milakov and Gimelshein, "Online normalizer
calculation for softmax" (2018); Dao et al., "Flash-Decoding for long-context inference" (2023).
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx
import numpy as np

Partial = tuple[mx.array, mx.array]
"""`out` and its log-sum-exp, float32; they agree in all axes but the last, which is 1 in the other.
"""

NOTHING = -1e30
"""The logit of a token that is not seen: finite, so that differences of two of them are no NaN."""

LOG_2 = math.log(2)
"""The unit of logits on a CPU, where weights are powers of two."""


def partial_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | None = None,
) -> Partial:
    """Attention of all queries over one piece: `(out, lse)`, both float32, to be merged with
    others.

    `queries` `[rows, query heads, L, dim]`, `keys` and `values` `[rows or 1, KV heads, T, dim]`;
    `mask` is boolean (True is seen) or added to the logits, broadcast to `[rows, query heads, L,
    T]`. `out` is `[rows, query heads, L, value dim]`, `lse` `[rows, query heads, L, 1]`. A query
    that sees nothing of the piece gets about `NOTHING` as `lse`, and weighs nothing.

    Matrix products of float32 run as TF32 on a GPU: exact for logits of 16-bit inputs, but about
    1e-3 off for inputs of 32 bits.
    """
    return biased_attention(queries, keys, values, scale, None if mask is None else bias_of(mask))


def biased_attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, bias: mx.array | None
) -> Partial:
    """As `partial_attention`, with the bias of its mask."""
    rows, heads, length, dim = queries.shape
    kv_heads, tokens = keys.shape[1], keys.shape[2]
    # A group's heads are folded into the query axis, so that keys are never repeated.
    folded = queries.astype(mx.float32).reshape(rows, kv_heads, -1, dim)
    # Scaling after the product keeps 16-bit inputs exact where float32 products run as TF32.
    logits = (folded @ keys.astype(mx.float32).swapaxes(-1, -2)) * _unit(scale)
    if bias is not None:
        logits = (logits.reshape(rows, heads, length, tokens) + bias).reshape(logits.shape)
    values = values.astype(mx.float32)
    if on_cpu():
        largest = logits.max(axis=-1, keepdims=True)
        weights, total = weights_of(logits, largest)
        out, lse = (weights @ values) / total, (largest + mx.log2(total)) * LOG_2
    else:
        lse = mx.logsumexp(logits, axis=-1, keepdims=True)
        # Not exp(logits - lse): a rounded log-sum-exp would scale the whole row.
        out = mx.softmax(logits, axis=-1) @ values
    return out.reshape(rows, heads, length, -1), lse.reshape(rows, heads, length, 1)


def weights_of(logits: mx.array, largest: mx.array) -> Partial:
    """Weights `[..., T]` and their sum `[..., 1]` of logits in units of log 2, for a CPU: there
    MLX's exponential costs more than all the rest of attention, and twice as much as its power.
    """
    weights = mx.power(2.0, logits - largest)
    # As a product the sum of the weights costs next to nothing.
    return weights, weights @ _ones(weights.shape[-1])


def bias_of(mask: mx.array) -> mx.array:
    """What is added to logits for a mask, boolean or added itself; never minus infinity: a piece
    that nobody sees has to have a log-sum-exp.
    """
    if mask.dtype == mx.bool_:
        return mx.where(mask, 0.0, NOTHING)
    added = mx.maximum(mask.astype(mx.float32), NOTHING)
    return added * _unit(1.0)


def merge_partials(partials: Sequence[Partial], sinks: mx.array | None = None) -> mx.array:
    """The attention over all pieces, float32; `sinks` `[query heads]` are logits that carry no
    value.
    """
    outs = [out for out, _ in partials]
    lses = [lse for _, lse in partials]
    if sinks is not None:
        sink = mx.broadcast_to(sinks.astype(mx.float32)[None, :, None, None], lses[0].shape)
        lses.append(sink)
    elif len(outs) == 1:
        return outs[0]
    elif len(outs) == 2:
        return outs[0] + (outs[1] - outs[0]) * mx.sigmoid(lses[1] - lses[0])
    weights = mx.softmax(mx.concatenate(lses, axis=-1), axis=-1)
    return (mx.stack(outs, axis=-2) * weights[..., : len(outs), None]).sum(axis=-2)


def on_cpu() -> bool:
    """Whether MLX computes on the CPU, whose costs are others than those of a GPU."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)


def _unit(scale: float) -> float:
    return scale / LOG_2 if on_cpu() else scale


@lru_cache(maxsize=256)
def _ones(count: int) -> mx.array:
    """Kept for all threads of the process, so it is data, and no operation of one of them that may
    never be computed there.
    """
    return mx.array(np.ones((count, 1), np.float32))
