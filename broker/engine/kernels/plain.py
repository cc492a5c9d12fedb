"""Shared-prefix decode attention in plain MLX operations, for every backend; a CPU's steps of one
token a row are in `joint.py`.

Each span is attended to once with the queries of all its rows, each tail on its own; partial
results are merged by their log-sum-exps, which always come from float32 scores: those of scores
rounded to 16 bits alone cost more than the whole accuracy allowance.
"""

from collections.abc import Callable, Sequence

import mlx.core as mx

from ..decode_plan import DecodePlan, Run
from ..partials import NOTHING, Partial, biased_attention, merge_partials

Attention = Callable[[mx.array, mx.array, mx.array, float, mx.array | None], Partial]

KV = tuple[mx.array, mx.array]


def fused_attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, bias: mx.array | None
) -> Partial:
    """As `partials.biased_attention`, with the output from MLX's fused attention and only the
    log-sum-exp from float32 scores: on CUDA faster, and as accurate, where queries are many.
    """
    rows, heads, length, dim = queries.shape
    kv_heads, tokens = keys.shape[1], keys.shape[2]
    folded = (queries.astype(mx.float32) * scale).reshape(rows, kv_heads, -1, dim)
    logits = folded @ keys.astype(mx.float32).swapaxes(-1, -2)
    mask = None
    if bias is not None:
        logits = logits.reshape(rows, heads, length, tokens) + bias
        mask = bias > NOTHING / 2
    lse = mx.logsumexp(logits, axis=-1).reshape(rows, heads, length, 1)
    out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
    return mx.where(lse > NOTHING / 2, out.astype(mx.float32), 0.0), lse


def attend_span(
    attention: Attention, queries: mx.array, span: KV, plan: DecodePlan, index: int, scale: float
) -> Partial:
    """The queries [N, Hq, 1, D] of a plan's group over its span [Hkv, P, D]: a partial of all rows,
    `NOTHING` for those outside of the group.
    """
    _, heads, _, dim = queries.shape
    kv_heads = span[0].shape[0]
    ratio = heads // kv_heads
    rows, places = plan.span_rows(index)
    chosen = queries if places is None else queries[rows]
    count = chosen.shape[0]
    # Rows and the heads that share a KV head become one query axis: the span is read once.
    folded = chosen.reshape(count, kv_heads, ratio, dim).swapaxes(0, 1)
    partial = attention(
        folded.reshape(1, kv_heads, -1, dim),
        span[0][None],
        span[1][None],
        scale,
        plan.span_bias(index, ratio),
    )
    out, lse = (
        part.reshape(kv_heads, count, ratio, -1).swapaxes(0, 1).reshape(count, heads, 1, -1)
        for part in partial
    )
    if places is None:
        return out, lse
    outside = mx.zeros((1, *out.shape[1:])), mx.full((1, heads, 1, 1), NOTHING)
    return mx.concatenate([out, outside[0]])[places], mx.concatenate([lse, outside[1]])[places]


def attend_tails(queries: mx.array, slab: KV, plan: DecodePlan, scale: float) -> Partial:
    """Every row over its own tail, a slot of the slab [slots, Hkv, capacity, D]."""
    bias = plan.tail_bias()[:, None, None]
    tokens = min(bias.shape[-1], slab[0].shape[2])
    keys, values = (part[plan.slots, :, :tokens] for part in slab)
    return biased_attention(queries, keys, values, scale, bias[..., :tokens])


def attend_runs(
    attention: Attention, queries: mx.array, slab: KV, runs: Sequence[Run], scale: float
) -> Partial:
    """Every row over its own tail, where rows are tokens of the same tails; `runs` are all rows."""
    outs, lses = [], []
    for run in runs:
        own = queries[run.first : run.last, :, 0].swapaxes(0, 1)[None]
        keys, values = (part[run.slot : run.slot + 1, :, run.begin : run.end] for part in slab)
        out, lse = attention(own, keys, values, scale, run.bias)
        outs.append(out[0].swapaxes(0, 1)[:, :, None])
        lses.append(lse[0].swapaxes(0, 1)[:, :, None])
    return mx.concatenate(outs), mx.concatenate(lses)


def merge(partials: Sequence[Partial], sinks: mx.array | None, dtype: mx.Dtype) -> mx.array:
    """The step's output [N, Hq, 1, D]."""
    return merge_partials(partials, sinks).astype(dtype)
