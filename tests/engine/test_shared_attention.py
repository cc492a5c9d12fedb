"""Plain shared-prefix decode attention against float64 attention over each row's whole context."""

from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_swarm.broker.engine.shared_attention import (
    DecodePlan,
    Geometry,
    Group,
    Span,
    Tails,
    decode_attention,
    implementation,
    plain_attention,
)


class Step(NamedTuple):
    """One decode step with random contents, as arrays and as numpy."""

    queries: mx.array
    spans: list[Span]
    tails: Tails
    groups: list[Group]
    lengths: list[int]
    slots: list[int]
    begins: list[int]
    positions: list[int]
    window: int
    sinks: mx.array | None

    def plan(self) -> DecodePlan:
        return DecodePlan(
            self.groups,
            self.lengths,
            slots=self.slots,
            begins=self.begins,
            window=self.window,
            positions=self.positions,
        )


@st.composite
def steps(draw: st.DrawFn, dtype: mx.Dtype = mx.float32) -> Step:
    rows, kv_heads = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    ratio, size = draw(st.integers(1, 4)), draw(st.sampled_from((8, 16, 80)))
    capacity, slots = draw(st.integers(1, 12)), draw(st.permutations(range(rows + 2)))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    deviation = draw(st.sampled_from((1.0, 4.0, 16.0)))

    def array(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)

    lengths = [draw(st.integers(0, capacity)) for _ in range(rows)]
    groups, spans, position = [], [], 0
    members = sorted(draw(st.sets(st.integers(0, rows - 1), min_size=1)))
    for _ in range(draw(st.integers(0, 3))):
        length = draw(st.integers(1, 20))
        groups.append(Group(members, length, position))
        whole = array(2, kv_heads, length + 3, size)
        spans.append(Span(whole[0, :, 2 : length + 2], whole[1, :, 2 : length + 2]))
        if draw(st.booleans()):  # the next span is nested: fewer rows, further on
            position += length
            members = members[: draw(st.integers(1, len(members)))]
        else:
            members, position = sorted(draw(st.sets(st.integers(0, rows - 1), min_size=1))), 0
    chosen, begins = list(slots)[:rows], [draw(st.integers(0, length)) for length in lengths]
    for row in range(1, rows):
        if lengths[row - 1] < capacity and draw(st.booleans()):  # the next token of the same tail
            chosen[row], begins[row] = chosen[row - 1], begins[row - 1]
            lengths[row] = lengths[row - 1] + 1
    ends = [max([g.start + g.length for g in groups if row in g.rows] + [0]) for row in range(rows)]
    return Step(
        array(rows, kv_heads * ratio, 1, size) * deviation,
        spans,
        Tails(
            array(rows + 2, kv_heads, capacity + 1, size),
            array(rows + 2, kv_heads, capacity + 1, size),
        ),
        groups,
        lengths,
        chosen,
        begins,
        ends,
        draw(st.sampled_from((0, 1, 7, 30))),
        array(kv_heads * ratio) if draw(st.booleans()) else None,
    )


def reference(step: Step, scale: float) -> np.ndarray:
    """float64, one row and one head at a time."""
    queries, sinks = _numpy(step.queries), step.sinks
    rows, heads = queries.shape[:2]
    out = np.zeros(queries.shape)
    for row in range(rows):
        keys, values = _context(step, row)
        for head in range(heads):
            kv_head = head // (heads // keys.shape[0])
            logits = keys[kv_head] @ queries[row, head, 0] * scale
            extra = [] if sinks is None else [_numpy(sinks)[head]]
            if not len(logits) + len(extra):
                out[row] = np.nan  # means nothing
                continue
            weights = np.exp(np.append(logits, extra) - max([*logits, *extra]))
            weights /= weights.sum()
            out[row, head, 0] = weights[: len(logits)] @ values[kv_head]
    return out


def _context(step: Step, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Every key and value that a row sees, [Hkv, tokens, D]."""
    slot, begin, end = step.slots[row], step.begins[row], step.lengths[row]
    first = step.positions[row] + end - step.window if step.window else -(1 << 30)
    keys, values = [], []
    for group, span in zip(step.groups, step.spans, strict=True):
        if row in group.rows:
            seen = max(0, first - group.start)
            keys.append(_numpy(span.keys)[:, seen:])
            values.append(_numpy(span.values)[:, seen:])
    begin = max(begin, first - step.positions[row])
    keys.append(_numpy(step.tails.keys)[slot, :, begin:end])
    values.append(_numpy(step.tails.values)[slot, :, begin:end])
    return np.concatenate(keys, axis=1), np.concatenate(values, axis=1)


def _numpy(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def _close(step: Step, out: mx.array, tolerance: float) -> None:
    expected = reference(step, 0.3)
    assert out.shape == expected.shape
    found = np.where(np.isnan(expected), np.nan, _numpy(out))
    assert np.isfinite(_numpy(out)).all()
    np.testing.assert_allclose(found, expected, atol=tolerance, rtol=tolerance)


@settings(max_examples=60, deadline=None)
@given(steps())
def test_agrees_with_attention_over_the_whole_context(step: Step) -> None:
    out = decode_attention(
        step.queries, step.spans, step.tails, step.plan(), scale=0.3, sinks=step.sinks
    )
    _close(step, out, 3e-5)


@settings(max_examples=25, deadline=None)
@given(steps())
def test_the_fused_form_agrees_too(step: Step) -> None:
    out = plain_attention(
        step.queries, step.spans, step.tails, step.plan(), 0.3, step.sinks, "fused"
    )
    _close(step, out, 3e-5)


@settings(max_examples=25, deadline=None)
@given(steps(mx.bfloat16))
def test_16_bit_inputs_are_computed_in_float32(step: Step) -> None:
    out = decode_attention(
        step.queries, step.spans, step.tails, step.plan(), scale=0.3, sinks=step.sinks
    )
    assert out.dtype == mx.bfloat16
    _close(step, out, 1e-2)


@settings(max_examples=25, deadline=None)
@given(steps(mx.float16))
def test_tails_may_be_wider_than_the_queries(step: Step) -> None:
    wide = Tails(*(part.astype(mx.float32) for part in step.tails))
    out = decode_attention(step.queries, step.spans, wide, step.plan(), scale=0.3, sinks=step.sinks)
    assert out.dtype == mx.float16
    _close(step, out, 2e-3)


def test_neither_spans_nor_tails_are_copied() -> None:
    """All that a step takes is less than a single tail."""
    rows, tokens, size = 8, 512, 256
    slab = mx.random.normal((1, 1, rows * tokens, size))
    view = mx.as_strided(
        slab, ((rows - 1) * tokens + 1, 1, tokens, size), (size, slab.size, size, 1)
    )
    extent = mx.random.normal((3, 1, 4096, size))
    span = Span(extent[1], extent[2])
    slots = [tokens * row for row in reversed(range(rows))]
    plan = DecodePlan(
        [Group(range(rows), 4096)], [tokens - row for row in range(rows)], slots=slots
    )
    queries = mx.random.normal((rows, 1, 1, size))
    mx.eval(queries, view, span)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(decode_attention(queries, [span], Tails(view, view), plan, scale=0.1))
    assert mx.get_peak_memory() - before < tokens * size * 4


@settings(max_examples=15, deadline=None)
@given(steps())
def test_advancing_is_planning_again_one_token_later(step: Step) -> None:
    room = step.tails.keys.shape[2]
    later = step._replace(lengths=[min(length + 1, room) for length in step.lengths])
    advanced = step.plan()
    decode_attention(step.queries, step.spans, step.tails, advanced, scale=0.3)
    out = decode_attention(
        step.queries, step.spans, step.tails, advanced.advance(), scale=0.3, sinks=step.sinks
    )
    _close(later, out, 3e-5)


def test_a_row_that_sees_nothing_stays_finite() -> None:
    keys = mx.ones((1, 2, 4, 8))
    queries = mx.ones((1, 2, 1, 8))
    out = decode_attention(queries, [], Tails(keys, keys), DecodePlan([], [0]), scale=1.0)
    assert mx.isfinite(out).all()


def test_says_which_implementation_serves_and_why() -> None:
    chosen = implementation(Geometry(8, 2, 64, "float32"))
    assert chosen.name == "scores"
    assert chosen.reason


def test_spans_must_match_the_groups() -> None:
    keys = mx.ones((1, 1, 4, 8))
    with pytest.raises(AssertionError, match="0 spans, 1 groups"):
        decode_attention(
            mx.ones((1, 1, 1, 8)),
            [],
            Tails(keys, keys),
            DecodePlan([Group([0], 4)], [1]),
            scale=1.0,
        )
