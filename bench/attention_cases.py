"""Cases for `bench.attention`: one layer of a decode step, and its error against float32."""

from typing import NamedTuple

import mlx.core as mx

from mlx_swarm.broker.engine.shared_attention import (
    DecodePlan,
    Geometry,
    Group,
    Span,
    Tails,
    decode_attention,
    plain_attention,
)


class Case(NamedTuple):
    """A step for one layer: shapes, groups, tails, and what a model may add."""

    geometry: Geometry
    groups: list[Group]
    lengths: list[int]
    window: int = 0
    sinks: bool = False
    deviation: float = 1.0


class Layer(NamedTuple):
    """The arrays of a case."""

    queries: mx.array
    spans: list[Span]
    tails: Tails
    plan: DecodePlan
    sinks: mx.array | None
    scale: float


def make(case: Case) -> Layer:
    """Random contents; tails are strided views whose slots are in reverse order."""
    g, dtype = case.geometry, getattr(mx, case.geometry.dtype)
    mx.random.seed(3)

    def random(*shape: int, scale: float = 1.0) -> mx.array:
        return (mx.random.normal(shape) * scale).astype(dtype)

    rows, room = len(case.lengths), max(case.lengths) + 5
    ends = [
        max([p.start + p.length for p in case.groups if row in p.rows] + [0]) for row in range(rows)
    ]
    plan = DecodePlan(
        case.groups,
        case.lengths,
        slots=list(reversed(range(rows))),
        window=case.window,
        positions=ends,
    )
    spans = [
        Span(*(random(2, g.kv_heads, p.length + 9, g.head_size)[:, :, 4 : p.length + 4]))
        for p in case.groups
    ]
    slab = random(rows, 2, g.kv_heads, room, g.head_size)
    sinks = random(g.query_heads) if case.sinks else None
    queries = random(rows, g.query_heads, 1, g.head_size, scale=case.deviation)
    return Layer(queries, spans, Tails(slab[:, 0], slab[:, 1]), plan, sinks, g.head_size**-0.5)


def attend(layer: Layer, name: str) -> mx.array:
    """The layer's attention by one implementation."""
    queries, spans, tails, plan, sinks, scale = layer
    if name in ("fused", "scores"):
        return plain_attention(queries, spans, tails, plan, scale, sinks, name)
    return decode_attention(queries, spans, tails, plan, scale=scale, sinks=sinks)


def whole_context(layer: Layer, row: int) -> tuple[mx.array, mx.array]:
    """Every key and value that a row sees, [Hkv, tokens, D]."""
    plan, first = layer.plan, 0
    end, slot = plan.host_lengths[row], plan.host_slots[row]
    if plan.window:
        first = plan.positions[row] + end - plan.window
    parts = [
        (span.keys[:, max(0, first - g.start) :], span.values[:, max(0, first - g.start) :])
        for g, span in zip(plan.groups, layer.spans, strict=True)
        if row in g.rows
    ]
    begin = max(0, first - plan.positions[row])
    parts.append((layer.tails.keys[slot, :, begin:end], layer.tails.values[slot, :, begin:end]))
    return mx.concatenate([k for k, _ in parts], 1), mx.concatenate([v for _, v in parts], 1)


def error_floor(dtype: str) -> float:
    """The least error that counts as one of stock attention: in float32 a merged log-sum-exp of 30
    is rounded by 2e-6 already.
    """
    return 1e-5 if dtype == "float32" else 1e-6


def errors(layer: Layer, out: mx.array, rows: list[int]) -> tuple[float, float]:
    """The worst head's error of these rows, ours and stock attention's, relative to its norm.

    Products are sums in float32: MLX's float32 matmul on CUDA rounds its operands.
    """
    ours = stock = 0.0
    for row in rows:
        keys, values = whole_context(layer, row)
        ratio = layer.queries.shape[1] // keys.shape[0]
        query = layer.queries[row].astype(mx.float32)
        scores = mx.concatenate(
            [
                (query[h : h + 1] * keys[h // ratio].astype(mx.float32)[None]).sum(-1)
                for h in range(query.shape[0])
            ]
        )
        scores = scores * layer.scale
        extra = None if layer.sinks is None else layer.sinks.astype(mx.float32)[:, None]
        whole = scores if extra is None else mx.concatenate([scores, extra], 1)
        weights = mx.softmax(whole, axis=-1)[:, : scores.shape[1]]
        exact = mx.stack(
            [
                (weights[h][:, None] * values[h // ratio].astype(mx.float32)).sum(0)
                for h in range(query.shape[0])
            ]
        )
        theirs = mx.fast.scaled_dot_product_attention(
            layer.queries[row : row + 1],
            keys[None],
            values[None],
            scale=layer.scale,
            sinks=layer.sinks,
        )
        ours = max(ours, _distance(out[row, :, 0], exact))
        stock = max(stock, _distance(theirs[0, :, 0], exact))
    return ours, stock


def _distance(out: mx.array, exact: mx.array) -> float:
    distance = mx.linalg.norm(out.astype(mx.float32) - exact, axis=-1)
    worst = (distance / mx.maximum(mx.linalg.norm(exact, axis=-1), 1e-6)).max().item()
    return float(worst) if worst == worst else float("inf")  # type: ignore[arg-type]
