"""Clones behave as the stock caches do, copy nothing of their prefix, and never change a donor."""

import gc
import hashlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import (
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_swarm.broker.cache import kinds
from mlx_swarm.broker.cache.extents import Extent, ExtentRange
from mlx_swarm.broker.cache.layout import Layout
from mlx_swarm.broker.engine.attention import STOCK, attend
from mlx_swarm.broker.errors import CacheError

HEADS, KV_HEADS, DIM = 4, 2, 32

steps = st.lists(
    st.one_of(
        st.integers(1, 11).map(lambda count: ("append", count)),
        st.just(("append", 1)),
        st.just(("append", 1)),
        st.integers(1, 6).map(lambda count: ("trim", count)),
    ),
    min_size=1,
    max_size=12,
)


@given(
    st.sampled_from(
        [
            lambda: KVCache(),
            lambda: ConcatenateKVCache(),
            lambda: QuantizedKVCache(32, 8),
            lambda: ChunkedKVCache(8),
            lambda: RotatingKVCache(8),
            lambda: RotatingKVCache(9, keep=3),
            lambda: RotatingKVCache(100, keep=3),
        ]
    ),
    st.integers(1, 40),
    st.integers(1, 9),
    steps,
    st.sampled_from([None, 5, 8]),
    st.integers(0, 2**31),
)
@settings(max_examples=120, deadline=None)
def test_a_clone_attends_to_what_the_stock_cache_attends_to(
    make: Any, length: int, chunk: int, steps: list[tuple[str, int]], window: int | None, seed: int
) -> None:
    """Same appends and trims on both: the same attention, through the masks each of them makes."""
    mx.random.seed(seed)
    stock = make()
    for start in range(0, length, chunk):
        _front(stock)
        stock.update_and_fetch(*_rows(min(chunk, length - start)))
    clone = _clone_of(stock, length)
    if isinstance(stock, ChunkedKVCache):
        # It makes no mask: that is the model's business.
        window = None
        _front(stock)
    if isinstance(stock, RotatingKVCache) and (stock.keep or stock.max_size < (window or 0)):
        window = None
    for action, count in steps:
        if action == "trim":
            # mlx-lm's ConcatenateKVCache forgets a trim with its next append.
            if (
                stock.is_trimmable()
                and count < stock.offset
                and type(stock) is not ConcatenateKVCache
            ):
                assert clone.trim(count) == stock.trim(count)
            continue
        _front(stock)
        _front(clone)
        queries, new = mx.random.normal((1, HEADS, count, DIM)), _rows(count)
        expected = _attention(stock, mx.array(queries), new, window)
        got = _attention(clone, queries, new, window)
        assert clone.offset == stock.offset
        assert mx.allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [6, 20])
@pytest.mark.parametrize("keep", [0, 2])
def test_a_window_clone_runs_far_past_its_prefix(window: int, keep: int) -> None:
    """The tail drops what left the window and its size stays bounded."""
    stock = RotatingKVCache(window, keep=keep)
    stock.update_and_fetch(*_rows(5))
    clone = _clone_of(stock, 5)
    for count in [1] * 300 + [7, 1, 1]:
        queries, new = mx.random.normal((1, HEADS, count, DIM)), _rows(count)
        expected = _attention(stock, queries, new, None)
        got = _attention(clone, queries, new, None)
        assert mx.allclose(got, expected, rtol=1e-4, atol=1e-5)
    assert clone.nbytes <= 2 * KV_HEADS * DIM * 4 * (window + 2 * 64)
    assert not clone.is_trimmable()
    assert clone.trim(clone.offset - 3) == 0
    sealed = kinds.seal([clone], kinds.layout_of([clone]), 0, clone.offset)
    stock_again = kinds.materialise([clone])[0]
    assert sealed.runs[0][-1][1] == stock_again.offset == stock.offset


def test_a_thousand_clones_take_their_tails_only() -> None:
    extent, layout = _donor(2_000, layers=4)
    span = extent.whole()
    before = _active()
    clones = [kinds.clone(layout, [span], None, 2_000) for _ in range(1_000)]
    for caches in clones:
        _ = [segment.planes for cache in caches for segment in cache.segments()]
    mx.eval([[s.planes for s in cache.segments()] for caches in clones for cache in caches])
    assert _active() == before
    for caches in clones[:100]:
        for cache in caches:
            cache.update_and_fetch(*_rows(1))
    mx.eval([[cache.state for cache in caches] for caches in clones])
    tails = sum(cache.nbytes for caches in clones for cache in caches)
    assert abs(_active() - before - tails) <= 0.02 * tails
    assert tails < 0.5 * 100 * extent.nbytes


def test_donors_are_bit_identical_after_their_clones_ran() -> None:
    """BEHAVIOURS 8: appended to, trimmed into the prefix, appended to again, dropped."""
    mx.random.seed(1)
    stock = [KVCache(), RotatingKVCache(16, keep=2), QuantizedKVCache(32, 4), ChunkedKVCache(16)]
    for cache in stock:
        cache.update_and_fetch(*_rows(60))
    layout = kinds.layout_of(stock)
    extent = kinds.seal(stock, layout, 0, 60)
    span = extent.whole()
    before = _checksums(extent)
    for turn in range(10):
        clones = kinds.clone(layout, [span], None, 60)
        for clone in clones:
            clone.update_and_fetch(*_rows(3 + turn))
            clone.trim(10)
            handle, _ = clone.update_and_fetch(*_rows(1))
            mx.eval(attend(mx.random.normal((1, HEADS, 1, DIM)), handle, 0.1), clone.state)
        kinds.seal(clones, layout, 50, clones[0].offset)
        del clones
        assert _checksums(extent) == before
    assert extent.references == 1


def test_clones_of_one_donor_do_not_see_each_other() -> None:
    extent, layout = _donor(20)
    first, second = (kinds.clone(layout, [extent.whole()], None, 20)[0] for _ in range(2))
    ours, theirs = _rows(2), _rows(2)
    first.update_and_fetch(*ours)
    second.update_and_fetch(*theirs)
    assert mx.array_equal(first.segments()[-1].planes[0], ours[0])
    assert mx.array_equal(second.segments()[-1].planes[0], theirs[0])


def test_a_clone_can_be_sealed_and_cloned_again() -> None:
    """Tail, prefix, and a run across both, while other clones share the extents."""
    mx.random.seed(2)
    stock = [KVCache(), QuantizedKVCache(32, 8), RotatingKVCache(64)]
    for cache in stock:
        cache.update_and_fetch(*_rows(30))
    layout = kinds.layout_of(stock)
    path = [kinds.seal(stock, layout, 0, 12).whole(), kinds.seal(stock, layout, 12, 30).whole()]
    clones = kinds.clone(layout, path, None, 25)
    for cache in stock:
        cache.trim(5)
    for count in (4, 1, 1):
        for cache, clone in zip(stock, clones, strict=True):
            new = _rows(count)
            cache.update_and_fetch(*new)
            clone.update_and_fetch(*new)
    kinds.validate(clones, layout, 31)
    for start, stop in ((25, 31), (3, 8), (10, 28), (0, 31)):
        ours, theirs = (kinds.seal(caches, layout, start, stop) for caches in (clones, stock))
        assert ours.runs == theirs.runs
        for mine, other in zip(ours.buffers, theirs.buffers, strict=True):
            assert mx.array_equal(mine, other)
    grandchild = kinds.clone(
        layout, [path[0], kinds.seal(clones, layout, 12, 31).whole()], None, 31
    )
    assert [cache.offset for cache in grandchild] == [31, 31, 31]


def test_ranges_of_one_extent_become_one_segment() -> None:
    extent, layout = _donor(90)
    first, rest = extent.whole().split(30)
    second, third = rest.split(31)
    [clone] = kinds.clone(layout, [first, second, third], None, 80)
    assert [(segment.start, segment.stop) for segment in clone.segments()] == [(0, 80)]


def test_trimming_reaches_into_the_prefix() -> None:
    extent, layout = _donor(40)
    [clone] = kinds.clone(layout, [extent.whole()], None, 40)
    clone.update_and_fetch(*_rows(4))
    assert clone.trim(9) == 9
    assert (clone.offset, clone.nbytes) == (35, 0)
    new = _rows(2)
    clone.update_and_fetch(*new)
    assert [(s.start, s.stop) for s in clone.segments()] == [(0, 35), (35, 37)]
    assert mx.array_equal(clone.segments()[1].planes[1], new[1])
    assert clone.trim(100) == 37
    assert clone.empty()
    clone.update_and_fetch(*new)
    assert clone.offset == clone.size() == 2


def test_a_window_clone_is_not_trimmed_to_where_its_window_is_gone() -> None:
    """BEHAVIOURS 4: less than asked is never taken silently."""
    stock = RotatingKVCache(8)
    for _ in range(30):
        stock.update_and_fetch(*_rows(1))
    clone = _clone_of(stock, 30)
    assert not clone.is_trimmable()
    assert clone.trim(2) == 0
    assert clone.offset == 30
    with pytest.raises(CacheError, match=r"\[20, 28\) needed, \[22, 28\) held"):
        _clone_of(stock, 28)


def test_a_tail_does_not_keep_a_fused_projection_alive() -> None:
    """A tail filled exactly would alias the array that was assigned, and what that is a view of."""
    _, layout = _donor(4)
    [clone] = kinds.clone(layout, [], None, 0)
    before = _active()
    fused = mx.random.normal((1, 20 * KV_HEADS, 64, DIM))
    clone.update_and_fetch(fused[:, :KV_HEADS], fused[:, KV_HEADS : 2 * KV_HEADS])
    mx.eval(clone.state)
    del fused
    assert abs(_active() - before - clone.nbytes) <= 0.02 * clone.nbytes


@pytest.mark.parametrize(
    "shape", [(2, KV_HEADS, 1, DIM), (1, KV_HEADS + 1, 1, DIM), (1, KV_HEADS, 1, DIM * 2)]
)
def test_rows_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    extent, layout = _donor(4)
    [clone] = kinds.clone(layout, [extent.whole()], None, 4)
    with pytest.raises(CacheError, match="appended to a KVCache"):
        clone.update_and_fetch(mx.zeros(shape), mx.zeros(shape))
    with pytest.raises(CacheError, match="bfloat16"):
        clone.update_and_fetch(*[mx.zeros((1, KV_HEADS, 1, DIM), mx.bfloat16)] * 2)
    assert clone.offset == 4


def _attention(cache: Any, queries: mx.array, new: Sequence[mx.array], window: int | None) -> Any:
    mask = create_attention_mask(queries.swapaxes(1, 2)[:, :, 0], cache, window_size=window)
    keys, values = cache.update_and_fetch(*new)
    if hasattr(keys, "segments"):
        out = attend(queries, keys, 0.3, mask)
    else:
        out = STOCK(queries, keys, values, cache=cache, scale=0.3, mask=mask)
    mx.eval(out, cache.state)
    return out


def _front(cache: Any) -> None:
    if hasattr(cache, "maybe_trim_front"):
        cache.maybe_trim_front()


def _rows(count: int) -> tuple[mx.array, mx.array]:
    shape = (1, KV_HEADS, count, DIM)
    return mx.random.normal(shape), mx.random.normal(shape)


def _clone_of(stock: Any, length: int) -> Any:
    layout = kinds.layout_of([stock])
    span = ExtentRange(extent := kinds.seal([stock], layout, 0, stock.offset), 0, length)
    extent.check_integrity()
    return kinds.clone(layout, [span], None, length)[0]


def _donor(tokens: int, layers: int = 1) -> tuple[Extent, Layout]:
    caches = [KVCache() for _ in range(layers)]
    for cache in caches:
        cache.update_and_fetch(*_rows(tokens))
    layout = kinds.layout_of(caches)
    return kinds.seal(caches, layout, 0, tokens), layout


def _checksums(extent: Extent) -> list[str]:
    return [hashlib.sha256(np.array(b).tobytes()).hexdigest() for b in extent.buffers]


def _active() -> int:
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()
