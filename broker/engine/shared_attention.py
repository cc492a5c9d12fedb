"""Decode attention of a batch whose rows share prefixes: a shared span is read once for all.

A step has N rows with one query token each. Each row attends to the spans of its groups and to its
own tail, the tokens that it shares with nobody. What belongs to whom is a `DecodePlan`, made once
for a step and used by all layers; the arrays of keys and values differ from layer to layer.

On an NVIDIA GPU two kernels do a layer (`kernels/`): one for all spans, one for all tails, the
merge and the sinks. Elsewhere, and for shapes that the kernels do not take, plain operations do
the same (`kernels/plain.py`, `kernels/joint.py`); `implementation` says which one serves, and why.

Sources: Juravsky et al., "Hydragen: High-throughput LLM inference with shared prefixes" (2024);
Dao, "FlashAttention-2" (2023); Shah et al., "FlashAttention-3" (2024).
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from .decode_plan import DecodePlan, Group
from .kernels import joint, launch, plain
from .kernels.launch import Geometry, Launches, make_launches
from .kernels.schedule import build_tables, split_tails
from .partials import biased_attention, on_cpu

__all__ = ["DecodePlan", "Geometry", "Group", "Implementation", "Span", "Tails"]
__all__ += ["decode_attention", "geometry_of", "implementation", "warm_up"]


class Span(NamedTuple):
    """One layer's KV of a shared span: keys and values [Hkv, P, D]. Views of larger buffers are
    fine if the last axis has unit stride; a range of an extent's plane is."""

    keys: mx.array
    values: mx.array


class Tails(NamedTuple):
    """One layer's slab of tails: keys and values [slots, Hkv, capacity, D], the last axis with unit
    stride. Token t of a row's tail lies at index t of its slot."""

    keys: mx.array
    values: mx.array


class Implementation(NamedTuple):
    """What serves: `kernel` (CUDA kernels), `fused` (plain operations around MLX's fused
    attention) or `scores` (plain operations alone); `reason` says why not the one before."""

    name: str
    reason: str


KERNEL, FUSED, SCORES = "kernel", "fused", "scores"

_Step = Callable[
    [DecodePlan, mx.array, Sequence[Span], Tails, mx.array | None],
    mx.array,
]


def decode_attention(
    queries: mx.array,
    spans: Sequence[Span],
    tails: Tails,
    plan: DecodePlan,
    *,
    scale: float,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of one decode step, [N, Hq, 1, D] in the queries' dtype.

    `queries` is [N, Hq, 1, D], its last axis with unit stride; `spans` are this layer's KV of
    `plan.groups`, in their order; the tails already hold the step's own token. `sinks` [Hq] are
    logits that take weight and carry no value. Nothing of a span or a tail is copied or repeated
    by the kernels. The output of a row that sees no token at
    all means nothing, but is finite.
    """
    key = queries.dtype, queries.shape, tails.keys.shape[1], scale, sinks is None
    step = plan.made.get(key)
    if step is None:
        assert len(spans) == len(plan.groups), f"{len(spans)} spans, {len(plan.groups)} groups"
        geometry = geometry_of(queries, tails)
        name = implementation(geometry, len(spans)).name
        step = plan.made[key] = _step(plan, geometry, scale, name, sinks=sinks is not None)
    return step(plan, queries, spans, tails, sinks)


def geometry_of(queries: mx.array, tails: Tails) -> Geometry:
    """The shapes that choose an implementation."""
    dtype = str(queries.dtype).rpartition(".")[2]
    return Geometry(queries.shape[1], tails.keys.shape[1], queries.shape[3], dtype)


def implementation(geometry: Geometry, spans: int = 1) -> Implementation:
    """What serves these shapes here. The first question about a geometry compiles its kernels and
    tries them against plain operations (seconds): `warm_up` asks it at load."""
    reason = _kernel_refusal(geometry)
    if not reason and spans > launch.MAX_SPANS:
        reason = f"{spans} groups in one step, the kernels take {launch.MAX_SPANS}"
    if not reason:
        return Implementation(KERNEL, "")
    return Implementation(FUSED if _fused_pays(geometry) else SCORES, reason)


def warm_up(geometry: Geometry, *, sinks: bool = False, window: bool = False) -> Implementation:
    """Compile at load what a model of this geometry can need, so that no step waits for it."""
    chosen = implementation(geometry)
    if chosen.name == KERNEL:
        for rows, groups in ((2, 1), (80, 1), (2, 2), (80, 2)):
            mx.eval(_trial(geometry, rows, groups, sinks=sinks, window=window, name=KERNEL))
    return chosen


def plain_attention(
    queries: mx.array,
    spans: Sequence[Span],
    tails: Tails,
    plan: DecodePlan,
    scale: float,
    sinks: mx.array | None,
    name: str,
) -> mx.array:
    """`decode_attention` in plain operations; `name` is `fused` or `scores`."""
    runs = plan.tail_runs()
    if name == SCORES and on_cpu() and not runs and tails.keys.dtype == mx.float32:
        return joint.attend(queries, spans, tails, plan, scale, sinks)
    attention = plain.fused_attention if name == FUSED else biased_attention
    parts = [
        plain.attend_span(attention, queries, span, plan, index, scale)
        for index, span in enumerate(spans)
    ]
    if runs:
        parts.append(plain.attend_runs(attention, queries, tails, runs, scale))
    else:
        # One query each: MLX's fused attention gains nothing there.
        parts.append(plain.attend_tails(queries, tails, plan, scale))
    return plain.merge(parts, sinks, queries.dtype)


def _step(plan: DecodePlan, geometry: Geometry, scale: float, name: str, *, sinks: bool) -> _Step:
    """What does one layer of a plan, and of the plans that it advances to."""
    if name != KERNEL:

        def plain_layer(
            now: DecodePlan,
            queries: mx.array,
            spans: Sequence[Span],
            tails: Tails,
            sinks: mx.array | None,
        ) -> mx.array:
            return plain_attention(queries, spans, tails, now, scale, sinks, name)

        return plain_layer
    launches = _launches(plan, geometry, scale, sinks=sinks)

    def layer(
        now: DecodePlan,
        queries: mx.array,
        spans: Sequence[Span],
        tails: Tails,
        sinks: mx.array | None,
    ) -> mx.array:
        return launches.layer(queries, spans, tails, now.lengths, sinks)

    return layer


def _launches(plan: DecodePlan, geometry: Geometry, scale: float, *, sinks: bool) -> Launches:
    """Cut a plan's spans and long tails into the blocks of one launch."""
    device = launch.gpu()
    assert device is not None
    segments = plan.segments()
    tails, begins = split_tails(
        plan.host_lengths, plan.host_begins, plan.host_slots, plan.positions, plan.window
    )
    segments += tails
    folded = max((len(segment.rows) for segment in segments), default=1) * geometry.ratio
    variant = launch.span_variant(geometry, device, folded)
    tables = build_tables(
        segments,
        plan.rows,
        launch.tiling(variant, geometry, device),
        window=plan.window,
        positions=plan.positions,
    )
    return make_launches(
        geometry,
        tables,
        variant,
        plan.host_slots,
        begins,
        spans=len(plan.groups),
        tail_segments=bool(tails),
        window=plan.window,
        scale=scale,
        sinks=sinks,
    )


@cache
def _kernel_refusal(geometry: Geometry) -> str:
    """Why the kernels cannot serve a geometry; "" after they agreed with plain operations."""
    reason = launch.unsupported(geometry)
    if reason:
        return reason
    try:
        ours, theirs = (_trial(geometry, 5, 2, name=name) for name in (KERNEL, SCORES))
        error = np.abs(np.array((ours - theirs).astype(mx.float32))).max()
    except RuntimeError as problem:
        return f"the kernels do not compile or run here: {str(problem)[:500]}"
    return "" if error < 0.02 else f"the kernels differ from plain operations by {error:.3g}"


def _trial(
    geometry: Geometry,
    rows: int,
    groups: int,
    *,
    name: str,
    sinks: bool = False,
    window: bool = False,
) -> mx.array:
    """One small step with random contents, always the same ones."""
    dtype, size = getattr(mx, geometry.dtype), geometry.head_size

    def random(seed: int, *shape: int) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)

    queries = random(0, rows, geometry.query_heads, 1, size)
    spans = [
        Span(*(random(2 * i + j, geometry.kv_heads, 300, size) for j in (1, 2)))
        for i in range(groups)
    ]
    tails = Tails(*(random(20 + j, rows, geometry.kv_heads, 40, size) for j in (1, 2)))
    plan = DecodePlan(
        [Group(range(rows), 300, start=300 * i) for i in range(groups)],
        [n % 40 for n in range(rows)],
        window=200 if window else 0,
        positions=[300 * groups] * rows,
    )
    sink = random(30, geometry.query_heads) if sinks else None
    step = _step(plan, geometry, size**-0.5, name, sinks=sinks)
    return step(plan, queries, spans, tails, sink)


def _fused_pays(geometry: Geometry) -> bool:
    """Measured on CUDA: the fused form is twice as fast. Its log-sum-exp is accurate enough for
    bfloat16, whose outputs are coarse, and not for float16."""
    return launch.gpu() is not None and geometry.dtype == "bfloat16" and geometry.head_size <= 128
