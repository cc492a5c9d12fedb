"""Attention over pieces of a sequence, and merging the pieces: plain operations, float32 inside.

Softmax attention over a concatenation is a weighted mean of the attentions over its parts, with
the weights exp(lse_i) / sum exp(lse_j). Sources: Milakov and Gimelshein, "Online normalizer
calculation for softmax" (2018); Dao et al., "Flash-Decoding for long-context inference" (2023).
"""

from collections.abc import Sequence

import mlx.core as mx

NOTHING = -1e30
"""The logit of a token that is not seen: finite, so that differences of two of them are no NaN."""


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
    that sees nothing of the piece gets about `NOTHING` as `lse`, and weighs nothing.

    Matrix products of float32 run as TF32 on a GPU: exact for logits of 16-bit inputs, but about
    1e-3 off for inputs of 32 bits.
    """
    rows, heads, length, dim = queries.shape
    kv_heads, tokens = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    # A group's heads are folded into the query axis, so that keys are never repeated.
    folded = queries.astype(mx.float32).reshape(rows, kv_heads, group * length, dim)
    # Scaling after the product keeps 16-bit inputs exact where float32 products run as TF32.
    logits = (folded @ keys.astype(mx.float32).swapaxes(-1, -2)) * scale
    if mask is not None:
        masked = _masked(logits.reshape(rows, heads, length, tokens), mask)
        logits = masked.reshape(logits.shape)
    lse = mx.logsumexp(logits, axis=-1, keepdims=True)
    # Not exp(logits - lse): a rounded log-sum-exp would scale the whole row.
    out = mx.softmax(logits, axis=-1) @ values.astype(mx.float32)
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
    weights = mx.softmax(mx.stack(lses), axis=0)
    return (mx.stack(outs) * weights[: len(outs)]).sum(axis=0)


def _masked(logits: mx.array, mask: mx.array) -> mx.array:
    if mask.dtype == mx.bool_:
        return mx.where(mask, logits, NOTHING)
    # Never minus infinity: a piece that nobody sees has to have a log-sum-exp.
    return mx.maximum(logits + mask.astype(mx.float32), NOTHING)
