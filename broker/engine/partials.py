"""Attention over pieces of a sequence, and merging the pieces: plain operations, float32 inside.

Softmax attention over a concatenation is a weighted mean of the attentions over its parts, with
the weights exp(lse_i) / sum exp(lse_j). Sources: Milakov and Gimelshein, "Online normalizer
calculation for softmax" (2018); Dao et al., "Flash-Decoding for long-context inference" (2023).
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import mlx.core as mx

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
    keys, values = keys.astype(mx.float32), values.astype(mx.float32)
    out, lse = weigh(
        # A group's heads are folded into the query axis, so that keys are never repeated.
        queries.reshape(rows, kv_heads, -1, dim),
        scale,
        lambda folded: folded @ keys.swapaxes(-1, -2),
        lambda weights: weights @ values,
        bias,
        (rows, heads, length, tokens),
    )
    return out.reshape(rows, heads, length, -1), lse.reshape(rows, heads, length, 1)


def weigh(
    queries: mx.array,
    scale: float,
    score: Callable[[mx.array], mx.array],
    mix: Callable[[mx.array], mx.array],
    bias: mx.array | None,
    shape: tuple[int, ...],
) -> Partial:
    """Attention whose two products are given: `score` makes logits `[..., T]` of float32 queries
    `[..., dim]`, `mix` the weighted sums of the values. A bias (`bias_of`) is added to the logits
    in the shape `shape`.
    """
    queries = queries.astype(mx.float32)
    if not on_cpu():
        # Scaling after the product keeps 16-bit inputs exact where float32 products run as TF32.
        logits = _add(score(queries) * scale, bias, shape)
        # Not exp(logits - lse): a rounded log-sum-exp would scale the whole row.
        return mix(mx.softmax(logits, axis=-1)), mx.logsumexp(logits, axis=-1, keepdims=True)
    # On a CPU, MLX's exponential costs more than all the rest, and twice as much as its power.
    logits = _add(score(queries * (scale / LOG_2)), bias, shape)
    largest = logits.max(axis=-1, keepdims=True)
    weights = mx.power(2.0, logits - largest)
    # As a product the sum of the weights costs next to nothing.
    total = weights @ _ones(weights.shape[-1])
    return mix(weights) / total, (largest + mx.log2(total)) * LOG_2


def bias_of(mask: mx.array) -> mx.array:
    """What `weigh` adds for a mask, boolean or added; never minus infinity: a piece that nobody
    sees has to have a log-sum-exp.
    """
    if mask.dtype == mx.bool_:
        return mx.where(mask, 0.0, NOTHING)
    added = mx.maximum(mask.astype(mx.float32), NOTHING)
    return added / LOG_2 if on_cpu() else added


def merge_partials(
    partials: Sequence[tuple[mx.array, mx.array]], sinks: mx.array | None = None
) -> mx.array:
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


def _add(logits: mx.array, bias: mx.array | None, shape: tuple[int, ...]) -> mx.array:
    if bias is None:
        return logits
    return (logits.reshape(shape) + bias).reshape(logits.shape)


@lru_cache(maxsize=256)
def _ones(count: int) -> mx.array:
    return mx.ones((count, 1))
