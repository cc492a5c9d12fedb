"""Attention over pieces of a sequence, and merging the pieces: plain operations, float32 inside.

Softmax attention over a concatenation is a weighted mean of the attentions over its parts, with
the weights exp(lse_i) / sum exp(lse_j). Sources: Milakov and Gimelshein, "Online normalizer
calculation for softmax" (2018); Dao et al., "Flash-Decoding for long-context inference" (2023).
"""

from collections.abc import Sequence

import mlx.core as mx

NOTHING = -1e30
"""The log-sum-exp of no logits at all: finite, so that differences of two of them are no NaN."""


def partial_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Attention of all queries over one piece: `(out, lse)`, both float32, to be merged with
    others.

    `queries` `[rows, query heads, L, dim]`, `keys` and `values` `[rows or 1, KV heads, T, dim]`;
    `mask` is boolean (True is seen) or added to the logits, broadcast to `[rows, query heads, L,
    T]`. `out` is `[rows, query heads, L, value dim]`, `lse` `[rows, query heads, L, 1]`. A query
    that sees nothing of the piece gets `lse` = `NOTHING`.
    """
    rows, heads, length, dim = queries.shape
    kv_heads, tokens = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    # A group's heads are folded into the query axis, so that keys are never repeated.
    folded = queries.astype(mx.float32).reshape(rows, kv_heads, group * length, dim)
    # Scaling after the product keeps 16-bit inputs exact where float32 products run as TF32.
    logits = (folded @ keys.astype(mx.float32).swapaxes(-1, -2)) * scale
    if mask is not None:
        shape = (rows, heads, length, tokens)
        logits = _masked(logits.reshape(shape), mask).reshape(logits.shape)
    peak = mx.maximum(logits.max(axis=-1, keepdims=True), NOTHING)
    weights = mx.exp(logits - peak)
    total = weights.sum(axis=-1, keepdims=True)
    out = (weights @ values.astype(mx.float32)) / mx.maximum(total, 1e-37)
    lse = mx.where(total > 0, peak + mx.log(mx.maximum(total, 1e-37)), NOTHING)
    out_shape = (rows, heads, length, values.shape[3])
    return out.reshape(out_shape), lse.reshape(rows, heads, length, 1)


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
    stacked = mx.stack(lses)
    weights = mx.exp(stacked - stacked.max(axis=0))
    total = weights.sum(axis=0)
    merged = outs[0] * weights[0]
    for out, weight in zip(outs[1:], weights[1 : len(outs)], strict=True):
        merged = merged + out * weight
    return merged / total


def _masked(logits: mx.array, mask: mx.array) -> mx.array:
    if mask.dtype == mx.bool_:
        return mx.where(mask, logits, -mx.inf)
    return logits + mask.astype(mx.float32)
