"""Shared-prefix decode attention on a CPU: everything that a row sees under one softmax.

There exponentials cost most and every operation has its price, so nothing is computed twice and
there are no partial results to merge: the pieces of a row's context, its spans and its tail, agree
on their largest logit first. All logits are in units of log 2 and `[KV heads, rows, ratio, T]`: the
rows of a span are then one matrix for each KV head.
"""

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import mlx.core as mx

from ..decode_plan import DecodePlan
from ..partials import LOG_2, NOTHING, weights_of

KV = tuple[mx.array, mx.array]


def attend(
    queries: mx.array,
    spans: Sequence[KV],
    slab: KV,
    plan: DecodePlan,
    scale: float,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of one decode step, `[N, Hq, 1, D]`, as `decode_attention` does it, if the slab is
    float32 and every tail has one row."""
    rows, heads, _, dim = queries.shape
    shape = rows, slab[0].shape[1], -1, dim
    folded = (queries.astype(mx.float32) * (scale / LOG_2)).reshape(shape).swapaxes(0, 1)
    ratio = folded.shape[2]
    pieces = [_SpanPiece.of(span, plan, index, ratio) for index, span in enumerate(spans)]
    out = _softmax([*pieces, _TailPiece.of(slab, plan)], folded, sinks)
    return out.swapaxes(0, 1).reshape(rows, heads, 1, -1).astype(queries.dtype)


def _softmax(
    pieces: Sequence["_SpanPiece | _TailPiece"], folded: mx.array, sinks: mx.array | None
) -> mx.array:
    logits = [piece.score(folded) for piece in pieces]
    tops = [
        piece.spread(logit.max(axis=-1, keepdims=True), NOTHING)
        for piece, logit in zip(pieces, logits, strict=True)
    ]
    outs, totals = [], []
    if sinks is not None:
        kv_heads, _, ratio, _ = folded.shape
        tops.append(sinks.astype(mx.float32).reshape(kv_heads, 1, ratio, 1) / LOG_2)
    top = reduce(mx.maximum, tops)
    if sinks is not None:
        totals.append(mx.power(2.0, tops[-1] - top))
    for piece, logit in zip(pieces, logits, strict=True):
        weights, total = weights_of(logit, piece.pick(top))
        totals.append(piece.spread(total, 0.0))
        outs.append(piece.spread(piece.mix(weights), 0.0))
    return reduce(mx.add, outs) / reduce(mx.add, totals)


class _SpanPiece(NamedTuple):
    """A span `[KV heads, P, D]`; `rows` and `places` as in `DecodePlan.span_rows`."""

    keys: mx.array
    values: mx.array
    rows: mx.array | slice
    places: mx.array | None
    bias: mx.array | None

    @classmethod
    def of(cls, span: KV, plan: DecodePlan, index: int, ratio: int) -> "_SpanPiece":
        keys, values = (part.astype(mx.float32) for part in span)
        return cls(keys, values, *plan.span_rows(index), plan.span_bias(index, ratio))

    def pick(self, whole: mx.array) -> mx.array:
        return whole if self.places is None else whole[:, self.rows]

    def spread(self, part: mx.array, missing: float) -> mx.array:
        if self.places is None:
            return part
        absent = mx.full((part.shape[0], 1, *part.shape[2:]), missing)
        return mx.take(mx.concatenate([part, absent], axis=1), self.places, axis=1)

    def score(self, folded: mx.array) -> mx.array:
        chosen = self.pick(folded)
        kv_heads, _, ratio, dim = chosen.shape
        logits = chosen.reshape(kv_heads, -1, dim) @ self.keys.swapaxes(-1, -2)
        if self.bias is not None:
            logits = logits + self.bias
        return logits.reshape(kv_heads, -1, ratio, logits.shape[-1])

    def mix(self, weights: mx.array) -> mx.array:
        kv_heads, rows, ratio, tokens = weights.shape
        out = weights.reshape(kv_heads, -1, tokens) @ self.values
        return out.reshape(kv_heads, rows, ratio, -1)


class _TailPiece(NamedTuple):
    """The tails of all rows, multiplied where they lie: slots of `[slots, KV heads, T, D]`."""

    keys: mx.array
    values: mx.array
    own: mx.array
    slots: mx.array
    bias: mx.array

    @classmethod
    def of(cls, slab: KV, plan: DecodePlan) -> "_TailPiece":
        bias = plan.tail_bias()
        tokens = min(bias.shape[-1], slab[0].shape[2])
        keys, values = (part[:, :, :tokens] for part in slab)
        places = plan.gather_places(keys.shape[1])
        return cls(keys.swapaxes(-1, -2), values, *places, bias[:, None, :tokens])

    def pick(self, whole: mx.array) -> mx.array:
        return whole

    def spread(self, part: mx.array, missing: float) -> mx.array:
        return part

    def score(self, folded: mx.array) -> mx.array:
        return mx.gather_mm(folded, self.keys, self.own, self.slots) + self.bias

    def mix(self, weights: mx.array) -> mx.array:
        return mx.gather_mm(weights, self.values, self.own, self.slots)
