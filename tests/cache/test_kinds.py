"""One codec a cache class: cut, join, clone and materialise give back what mlx-lm's class held."""

import gc
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_swarm.broker.cache import kinds
from mlx_swarm.broker.cache.clones import FullClone, WindowClone
from mlx_swarm.broker.cache.layout import ListNode
from mlx_swarm.broker.errors import CacheError, UnsupportedCacheKind
from tests.cache import rows

Maker = Callable[[], list[Any]]
TOKENS = tuple(int(token) for token in np.random.default_rng(3).integers(0, 50_000, 40))

MIXES: dict[str, Maker] = {
    **rows.FAMILIES,
    "window with kept tokens": lambda: [RotatingKVCache(8, keep=3), KVCache()],
    "wide window": lambda: [RotatingKVCache(64), RotatingKVCache(64, keep=4)],
    "two windows": lambda: [RotatingKVCache(8), RotatingKVCache(12, keep=2), KVCache()],
    "chunked": lambda: [ChunkedKVCache(8), ChunkedKVCache(8), KVCache()],
    "quantized in groups of 32": lambda: [QuantizedKVCache(32, bits) for bits in (2, 3, 4, 6, 8)],
    "nested twice": lambda: [CacheList(KVCache(), CacheList(RotatingKVCache(8), ArraysCache(3)))],
    "five slots": lambda: [ArraysCache(5), ArraysCache(1)],
}


@pytest.mark.parametrize("chunk", [1, 5, 40])
@pytest.mark.parametrize("mix", MIXES)
def test_sealed_and_materialised_caches_hold_the_same_rows(mix: str, chunk: int) -> None:
    caches = _build(mix, TOKENS, chunk)
    layout = kinds.layout_of(caches)
    path = _seal_in_two(caches, layout, len(TOKENS))
    checkpoint = kinds.snapshot(caches, layout)
    assert layout.valid_length(path, [len(TOKENS)], len(TOKENS)) == (len(TOKENS), None)
    clones = kinds.clone(layout, path, checkpoint, len(TOKENS))
    assert kinds.layout_of(clones) == layout
    for stock in (kinds.materialise(clones), kinds.materialise(caches)):
        assert [type(c) for c in stock] == [type(c) for c in caches]
        assert kinds.layout_of(stock) == layout
        _same_contents(stock, caches)


@pytest.mark.parametrize("mix", MIXES)
def test_every_valid_length_equals_a_fresh_computation(mix: str) -> None:
    """Cut anywhere the layout allows: what comes out is what computing that prefix alone gives."""
    caches = _build(mix, TOKENS, 5)
    layout = kinds.layout_of(caches)
    path = _seal_in_two(caches, layout, len(TOKENS))
    checkpoint = kinds.snapshot(caches, layout)
    for length in range(1, len(TOKENS) + 1):
        if layout.valid_length(path, [len(TOKENS)], length).length != length:
            with pytest.raises(CacheError, match=r"needed|checkpoint"):
                kinds.clone(layout, path, None, length)
            continue
        stock = kinds.materialise(kinds.clone(layout, path, checkpoint, length))
        fresh = _build(mix, TOKENS[:length], 5)
        _same_contents(stock, fresh)


@pytest.mark.parametrize("keep", [0, 3])
@pytest.mark.parametrize("length", [1, 3, 7, 8, 9, 15, 16, 17, 30])
@pytest.mark.parametrize("chunk", [1, 4, 11])
def test_a_ring_is_read_in_order_wherever_it_stands(keep: int, length: int, chunk: int) -> None:
    ring = [RotatingKVCache(8, keep=keep)]
    for start in range(0, length, chunk):
        rows.advance(ring, TOKENS[: min(start + chunk, length)], start)
    layout = kinds.layout_of(ring)
    span = kinds.seal(ring, layout, 0, length).whole()
    [expected] = rows.contents(ring)
    assert isinstance(expected, rows.Rows)
    held = [position for run in span.runs(0) for position in range(*run)]
    assert held == list(expected.positions)
    segments = span.segments(0)
    got = [np.concatenate([np.array(s.planes[p])[0] for s in segments], 1) for p in (0, 1)]
    for mine, theirs in zip(got, expected.planes, strict=True):
        assert np.array_equal(mine, theirs)


@pytest.mark.parametrize("trimmed", [1, 4])
def test_trimmed_caches_give_only_what_is_left(trimmed: int) -> None:
    caches = [KVCache(), ConcatenateKVCache(), RotatingKVCache(64)]
    rows.advance(caches, TOKENS, 0)
    for cache in caches:
        cache.trim(trimmed)
    length = len(TOKENS) - trimmed
    layout = kinds.layout_of(caches)
    kinds.validate(caches, layout, length)
    with pytest.raises(CacheError, match="held"):
        kinds.seal(caches, layout, 0, len(TOKENS))
    stock = kinds.materialise(
        kinds.clone(layout, [kinds.seal(caches, layout, 0, length).whole()], None, length)
    )
    fresh = [KVCache(), ConcatenateKVCache(), RotatingKVCache(64)]
    rows.advance(fresh, TOKENS[:length], 0)
    _same_contents(stock, fresh)


def test_unused_slots_stay_unused() -> None:
    caches = [ArraysCache(4), KVCache()]
    rows.advance(caches[1:], TOKENS, 0)
    caches[0][1] = mx.ones((1, 3))
    layout = kinds.layout_of(caches)
    checkpoint = kinds.snapshot(caches, layout)
    assert checkpoint is not None
    assert checkpoint.nbytes == layout.state_bytes == 12
    path = [kinds.seal(caches, layout, 0, 40).whole()]
    clone = kinds.clone(layout, path, checkpoint, 40)[0]
    assert [slot is None for slot in clone.cache] == [True, False, True, True]


def test_a_checkpoint_owns_exactly_its_bytes() -> None:
    """BEHAVIOURS 16: a state that is a view keeps a prefill's whole activations alive."""
    caches = [ArraysCache(2) for _ in range(4)]
    for cache in caches:
        activations = mx.random.normal((1, 2_000, 64))
        cache[0] = activations[:, -3:, :]
        cache[1] = mx.random.normal((1, 8, 64, 16))
    mx.eval([cache.cache for cache in caches])
    layout = kinds.layout_of(caches)
    before = _active()
    checkpoint = kinds.snapshot(caches, layout)
    assert checkpoint is not None
    assert checkpoint.nbytes == layout.state_bytes == 4 * 4 * (3 * 64 + 8 * 64 * 16)
    assert abs(_active() - before - checkpoint.nbytes) <= 0.02 * checkpoint.nbytes
    assert len(checkpoint.buffers) == 2


def test_a_checkpoint_survives_what_is_done_to_its_clones() -> None:
    caches = _build("state", TOKENS, 5)
    layout = kinds.layout_of(caches)
    path = [kinds.seal(caches, layout, 0, 40).whole()]
    checkpoint = kinds.snapshot(caches, layout)
    before = rows.contents(caches)
    for _ in range(3):
        clones = kinds.clone(layout, path, checkpoint, 40)
        clones[0][0][...] = 0
        caches[0][1] += 1
    again = kinds.materialise(kinds.clone(layout, path, checkpoint, 40))
    for got, expected in zip(rows.contents(again)[:1], before[:1], strict=True):
        assert rows.same(got, expected)


def test_materialised_caches_own_their_arrays() -> None:
    caches = _build("window", TOKENS, 5)
    copies = kinds.materialise(caches)
    before = rows.contents(caches)
    rows.advance(copies, (*TOKENS, 5), len(TOKENS))
    copies[0].keys[...] = 0
    for got, expected in zip(rows.contents(caches), before, strict=True):
        assert rows.same(got, expected)


def test_fewer_caches_than_layers_and_no_length_at_all() -> None:
    caches = _build("window", TOKENS, 5)
    layout = kinds.layout_of(caches)
    empty = kinds.clone(layout, [], None, 0)
    assert [type(cache) for cache in empty] == [FullClone, WindowClone]
    assert all(cache.empty() and cache.offset == 0 for cache in empty)
    assert [type(cache) for cache in kinds.materialise(empty)] == [KVCache, RotatingKVCache]


@pytest.mark.parametrize(
    ("cache", "name"),
    [
        (BatchKVCache([0]), "BatchKVCache"),
        (BatchRotatingKVCache(8, [0]), "BatchRotatingKVCache"),
        (object(), "object"),
        (type("Fancy", (KVCache,), {})(), "Fancy"),
        (CacheList(BatchKVCache([0])), "BatchKVCache"),
    ],
)
def test_unknown_kinds_are_refused_by_name(cache: Any, name: str) -> None:
    with pytest.raises(UnsupportedCacheKind, match=name):
        kinds.layout_of([cache])


def test_what_cannot_be_stored_is_refused_with_the_numbers() -> None:
    full, two_rows, grown = KVCache(), KVCache(), KVCache()
    for cache, batch, tokens in ((full, 1, 6), (two_rows, 2, 6), (grown, 1, 7)):
        cache.update_and_fetch(mx.zeros((batch, 2, tokens, 8)), mx.zeros((batch, 2, tokens, 8)))
    layout = kinds.layout_of([full, full])
    cases: list[tuple[Sequence[Any], int, str]] = [
        ([full, full], 5, "cache 0 is at offset 6; 5 tokens"),
        ([full, grown], 6, "cache 1 is at offset 7; 6 tokens"),
        ([full, two_rows], 6, "2 rows"),
        ([full], 6, "1 caches; the namespace has 2"),
        ([], 6, "0 caches"),
        ([full, KVCache()], 6, "empty"),
        ([full, _half(6)], 6, r"cache 1 is KVCache\(float16"),
        ([full, ArraysCache(1)], 6, "cache 1 is ArraysCache"),
    ]
    for caches, length, message in cases:
        with pytest.raises(CacheError, match=message):
            kinds.validate(caches, layout, length)
    short = KVCache.from_state((full.keys[..., :4, :], full.values[..., :4, :], 6))
    with pytest.raises(CacheError, match="offset 6, its arrays hold 4"):
        kinds.layout_of([short])
    with pytest.raises(CacheError, match=r"seal tokens \[4, 4\)"):
        kinds.seal([full, full], layout, 4, 4)


def test_a_clone_needs_a_path_that_reaches_its_length() -> None:
    caches = _build("state", TOKENS, 5)
    layout = kinds.layout_of(caches)
    upper, lower = kinds.seal(caches, layout, 0, 40).whole().split(10)
    checkpoint = kinds.snapshot(caches, layout)
    with pytest.raises(CacheError, match="a range from 10 where 0"):
        kinds.clone(layout, [lower], checkpoint, 40)
    with pytest.raises(CacheError, match="40 tokens wanted, the ranges hold 10"):
        kinds.clone(layout, [upper], checkpoint, 40)
    with pytest.raises(CacheError, match="no checkpoint"):
        kinds.clone(layout, [upper, lower], None, 40)


def test_a_row_in_the_middle_of_a_padded_batch_is_refused() -> None:
    cache = ArraysCache(1, left_padding=[2])
    cache[0] = mx.zeros((1, 3))
    with pytest.raises(CacheError, match="padded batch"):
        kinds.layout_of([cache])


def test_rows_go_into_a_batch_and_come_back() -> None:
    """Materialised clones merge into mlx-lm's batch caches; what is extracted can be sealed."""
    texts = (TOKENS[:7], TOKENS[3:30])
    pairs = [kinds.materialise(_build_all(MIXES["window"](), tokens)) for tokens in texts]
    batch = [type(layer[0]).merge(list(layer)) for layer in zip(*pairs, strict=True)]
    for row, tokens in enumerate(texts):
        extracted = [cache.extract(row) for cache in batch]
        layout = kinds.layout_of(extracted)
        kinds.validate(extracted, layout, len(tokens))
        span = kinds.seal(extracted, layout, 0, len(tokens)).whole()
        again = kinds.materialise(kinds.clone(layout, [span], None, len(tokens)))
        _same_contents(again, pairs[row])


def test_values_of_no_width_take_no_bytes() -> None:
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 1, 9, 16)), mx.zeros((1, 1, 9, 0)))
    layout = kinds.layout_of([cache])
    [clone] = kinds.clone(layout, [kinds.seal([cache], layout, 0, 9).whole()], None, 5)
    clone.update_and_fetch(mx.ones((1, 1, 2, 16)), mx.zeros((1, 1, 2, 0)))
    assert kinds.seal([clone], layout, 0, 7).nbytes == 7 * layout.bytes_per_token == 7 * 64
    assert kinds.materialise([clone])[0].values.shape == (1, 1, 7, 0)


def test_layouts_are_values() -> None:
    first, second = (kinds.layout_of(_build("nested twice", TOKENS, chunk)) for chunk in (3, 8))
    assert first == second
    assert hash(first) == hash(second)
    assert isinstance(first.nodes[0], ListNode)
    assert first != kinds.layout_of(_build("nested", TOKENS, 3))


def _build(mix: str, tokens: Sequence[int], chunk: int) -> list[Any]:
    return _build_all(MIXES[mix](), tokens, chunk)


def _build_all(caches: list[Any], tokens: Sequence[int], chunk: int = 5) -> list[Any]:
    for start in range(0, len(tokens), chunk):
        for cache in caches:
            if isinstance(cache, ChunkedKVCache):
                cache.maybe_trim_front()
        rows.advance(caches, tokens[: start + chunk], start)
    return caches


def _seal_in_two(caches: Sequence[Any], layout: Any, length: int) -> list[Any]:
    middle = length // 3
    return [
        kinds.seal(caches, layout, start, stop).whole()
        for start, stop in ((0, middle), (middle, length))
    ]


def _half(tokens: int) -> KVCache:
    cache = KVCache()
    cache.update_and_fetch(*[mx.zeros((1, 2, tokens, 8), mx.float16)] * 2)
    return cache


def _same_contents(left: Sequence[Any], right: Sequence[Any]) -> None:
    for got, expected in zip(rows.contents(left), rows.contents(right), strict=True):
        assert rows.same(got, expected)
        if isinstance(got, rows.Rows) and isinstance(expected, rows.Rows):
            newest = expected.positions[-5:]
            assert np.array_equal(got.positions[-len(newest) :], newest)


def _active() -> int:
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()
