"""Shared-prefix decode attention in plain MLX operations, for every backend.

Each span is attended to once with the queries of all its rows, each tail on its own; partial
results are merged by their log-sum-exps, which always come from float32 scores: those of scores
rounded to 16 bits alone cost more than the whole accuracy allowance.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx

from ..partials import NOTHING, merge_partials

Partial = tuple[mx.array, mx.array]
"""out [N, Hq, 1, D] and log-sum-exp [N, Hq, 1, 1], float32."""

Attention = Callable[[mx.array, mx.array, mx.array, float, mx.array | None], Partial]


def fused_attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None
) -> Partial:
    """As `partials.partial_attention`, with the output from MLX's fused attention and only the
    log-sum-exp from float32 scores: on CUDA faster, and as accurate, where queries are many.
    """
    rows, heads, length, dim = queries.shape
    kv_heads, tokens = keys.shape[1], keys.shape[2]
    folded = (queries.astype(mx.float32) * scale).reshape(rows, kv_heads, -1, dim)
    logits = folded @ keys.astype(mx.float32).swapaxes(-1, -2)
    if mask is not None:
        shape = (rows, heads, length, tokens)
        logits = mx.where(mask, logits.reshape(shape), NOTHING).reshape(logits.shape)
    lse = mx.logsumexp(logits, axis=-1).reshape(rows, heads, length, 1)
    out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
    return mx.where(lse > NOTHING / 2, out.astype(mx.float32), 0.0), lse


def attend_span(
    attention: Attention,
    queries: mx.array,
    span: tuple[mx.array, mx.array],
    rows: mx.array | slice,
    places: mx.array | None,
    visible: mx.array | None,
    scale: float,
) -> Partial:
    """The queries of `rows` over one span [Hkv, P, D], as a partial of all rows.

    `visible` is a boolean mask [rows, P]; `places` [N] says where in `rows` each row of the batch
    is, and len(rows) for those that do not attend; None where all rows do, in order.
    """
    heads, dim = queries.shape[1], queries.shape[3]
    keys, values = span[0][None], span[1][None]
    kv_heads = keys.shape[1]
    chosen = queries[rows, :, 0]
    count = chosen.shape[0]
    # Rows and the heads that share a KV head become one query axis: the span is read once.
    folded = chosen.reshape(count, kv_heads, -1, dim).swapaxes(0, 1).reshape(1, kv_heads, -1, dim)
    mask = None
    if visible is not None:
        mask = mx.repeat(visible, heads // kv_heads, axis=0)[None, None]
    out, lse = attention(folded, keys, values, scale, mask)
    parts = [
        part.reshape(kv_heads, count, heads // kv_heads, -1)
        .swapaxes(0, 1)
        .reshape(count, heads, 1, -1)
        for part in (out, lse)
    ]
    if places is None:
        return parts[0], parts[1]
    absent = mx.zeros((1, heads, 1, dim)), mx.full((1, heads, 1, 1), NOTHING)
    full = [mx.concatenate(list(pair))[places] for pair in zip(parts, absent, strict=True)]
    return full[0], full[1]


def attend_tails(
    attention: Attention,
    queries: mx.array,
    slab: tuple[mx.array, mx.array],
    slots: mx.array | None,
    visible: mx.array,
    scale: float,
) -> Partial:
    """Every row over its own tail, a slot of the slab [slots, Hkv, capacity, D]; `visible` is a
    boolean mask [N, T] of the first T tokens of the slots; `slots` None is slot n for row n.
    """
    rows, tokens = visible.shape[0], min(visible.shape[1], slab[0].shape[2])
    chosen: slice | mx.array = slice(rows) if slots is None else slots
    keys, values = (part[chosen, :, :tokens] for part in slab)
    return attention(queries, keys, values, scale, visible[:, None, None, :tokens])


class Run(NamedTuple):
    """Rows [first, last): the last tokens of [begin, end) in a slot, one after the other."""

    first: int
    last: int
    slot: int
    begin: int
    end: int


def attend_runs(
    attention: Attention,
    queries: mx.array,
    slab: tuple[mx.array, mx.array],
    runs: Sequence[Run],
    window: int,
    scale: float,
) -> Partial:
    """Every row over its own tail, where rows are tokens of the same tails; `runs` are all rows."""
    outs, lses = [], []
    for first, last, slot, begin, end in runs:
        own = queries[first:last, :, 0].swapaxes(0, 1)[None]
        stop = max(end, begin + 1)  # one token at least, seen or not
        keys, values = (part[slot : slot + 1, :, begin:stop] for part in slab)
        place, token = mx.arange(end - (last - first), end)[:, None], mx.arange(begin, stop)[None]
        visible = token <= place
        if window:
            visible = visible & (token > place - window)
        out, lse = attention(own, keys, values, scale, visible)
        outs.append(out[0].swapaxes(0, 1)[:, :, None])
        lses.append(lse[0].swapaxes(0, 1)[:, :, None])
    return mx.concatenate(outs), mx.concatenate(lses)


def merge(partials: Sequence[Partial], sinks: mx.array | None, dtype: mx.Dtype) -> mx.array:
    """The step's output [N, Hq, 1, D]."""
    return merge_partials(partials, sinks).astype(dtype)
