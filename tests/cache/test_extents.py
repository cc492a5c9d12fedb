"""Extents: bytes that are true, splits that move nothing, slack, compaction."""

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache

from mlx_swarm.broker.cache import kinds
from mlx_swarm.broker.cache.extents import Extent, ExtentRange, compact
from mlx_swarm.broker.cache.holdings import Holdings
from mlx_swarm.broker.cache.layout import Layout, Plane, Retention, TokenLeaf
from mlx_swarm.broker.cache.runs import clean_runs, intersect_runs, window_length
from mlx_swarm.broker.errors import CacheError

Maker = Callable[[], Any]
MIXES: dict[str, list[Maker]] = {
    "full": [KVCache] * 6,
    "window": [KVCache, lambda: RotatingKVCache(128, keep=4)] * 3,
    "quantized": [lambda: QuantizedKVCache(32, 4)] * 4,
}


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("mix", MIXES)
def test_memory_grows_by_what_is_reported(mix: str, heads: int) -> None:
    """A view of a stock cache's buffers would keep all of them alive."""
    caches = _filled(MIXES[mix], 700, heads)
    layout = kinds.layout_of(caches)
    before = _active()
    extents = [kinds.seal(caches, layout, start, start + 150) for start in (0, 150, 550)]
    grown = _active() - before
    reported = sum(extent.nbytes for extent in extents)
    assert abs(grown - reported) <= 0.02 * reported
    donors = sum(_bytes(cache) for cache in caches)
    del caches
    assert abs(before + reported - donors - _active()) <= 0.02 * reported


@pytest.mark.parametrize("mix", MIXES)
def test_releasing_the_last_range_frees_the_buffers(mix: str) -> None:
    caches = _filled(MIXES[mix], 300)
    layout = kinds.layout_of(caches)
    before = _active()
    span = kinds.seal(caches, layout, 0, 300).whole()
    other = span.retain()
    span.release()
    span.release()
    assert other.extent.references == 1
    assert other.nbytes > 0
    other.release()
    assert other.nbytes == other.extent.nbytes == 0
    assert _active() == before


def test_many_splits_add_no_buffer_and_no_byte() -> None:
    caches = _filled(MIXES["full"], 2_001)
    extent = kinds.seal(caches, kinds.layout_of(caches), 0, 2_001)
    before = _active()
    rest, nodes = extent.whole(), []
    for at in range(1, 2_001):
        node, rest = rest.split(at)
        nodes.append(node)
    assert len(extent.buffers) == 1
    assert extent.references == 2_001
    assert sum(node.nbytes for node in [*nodes, rest]) == extent.nbytes
    assert extent.slack == 0
    assert _active() == before


def test_one_buffer_for_all_layers_of_a_class() -> None:
    caches = _filled([KVCache] * 30, 4)
    layout = kinds.layout_of(caches)
    assert [buffer.shape for buffer in kinds.seal(caches, layout, 0, 4).buffers] == [(60, 2, 4, 32)]
    assert layout.bytes_per_token == 60 * 2 * 32 * 4


def test_an_extent_takes_no_more_memory_of_the_host_for_more_layers() -> None:
    caches = _filled([KVCache] * 60, 4)
    layout = kinds.layout_of(caches)
    kinds.seal(caches, layout, 0, 4).segments(0, 0, 4)
    tracemalloc.start()
    held = [kinds.seal(caches, layout, 0, 4).whole() for _ in range(50)]
    gc.collect()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert size / len(held) < 2_000


def test_slack_is_what_no_range_refers_to() -> None:
    extent = _extent(100)
    upper, lower = extent.whole().split(30)
    middle, last = lower.split(70)
    middle.release()
    assert extent.slack == extent.bytes_between(30, 70) == 40 * extent.layout.bytes_per_token
    extent.check_integrity()
    again = ExtentRange(extent, 20, 40)
    assert extent.slack == 30 * extent.layout.bytes_per_token
    for span in (upper, last, again):
        span.release()
    assert extent.nbytes == extent.slack == 0


def test_the_bytes_of_an_extent_are_added_up_again_only_when_some_may_have_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long document from which a thousand agents part is a thousand ranges of one extent."""
    holdings = Holdings()
    span = holdings.adopt(_extent(100), "")
    upper, lower = span.split(60)
    clones = [holdings.lend(part) for part in (upper, lower) for _ in range(3)]
    counted: list[tuple[int, int]] = []
    count = Extent.bytes_between

    def bytes_between(extent: Extent, start: int, stop: int) -> int:
        counted.append((start, stop))
        return count(extent, start, stop)

    monkeypatch.setattr(Extent, "bytes_between", bytes_between)
    for clone in clones:
        holdings.give_back(clone)
    assert not counted
    holdings.release(lower)
    assert counted == [(0, 60)]
    assert holdings.slack_bytes == span.extent.nbytes * 2 // 5
    holdings.release(upper)
    assert holdings.total_bytes == 0


def test_compaction_gives_the_dead_part_back() -> None:
    extent = _extent(400)
    upper, lower = extent.whole().split(100)
    expected = _rows(upper, 0)
    lower.release()
    before = _active()
    [live] = compact([upper])
    assert extent.nbytes == 0
    assert live.nbytes == live.extent.nbytes == 100 * extent.layout.bytes_per_token
    assert mx.array_equal(_rows(live, 0), expected)
    assert abs(before - _active() - 300 * extent.layout.bytes_per_token) <= 0.02 * before


def test_compaction_merges_a_path_into_one_buffer() -> None:
    caches = _filled(MIXES["full"], 90)
    layout = kinds.layout_of(caches)
    path = [kinds.seal(caches, layout, at, at + 30).whole() for at in (0, 30, 60)]
    merged = compact(path)
    assert [(span.start, span.stop) for span in merged] == [(0, 30), (30, 60), (60, 90)]
    assert len({id(span.extent) for span in merged}) == 1
    clone = kinds.clone(layout, merged, None, 90)[0]
    assert len(clone.segments()) == 1
    assert mx.array_equal(clone.segments()[0].planes[0], caches[0].keys[..., :90, :])


def test_compaction_can_drop_windows_that_the_end_does_not_need() -> None:
    caches = [RotatingKVCache(16, keep=2), KVCache()]
    for cache in caches:
        cache.update_and_fetch(*_random(100))
    layout = kinds.layout_of(caches)
    span = kinds.seal(caches, layout, 0, 100).whole()
    assert layout.valid_length([span], (), 50).length == 50
    [span] = compact([span], windows_at_end=True)
    assert span.runs(0) == ((0, 2), (86, 100))
    assert layout.valid_length([span], (), 100) == (100, None)
    assert layout.valid_length([span], (), 99) == (2, "window_gone")
    span.extent.check_integrity()


def test_ranges_that_do_not_follow_each_other_are_not_compacted() -> None:
    upper, lower = _extent(10).whole().split(4)
    with pytest.raises(CacheError, match="ends at 10 before one from 0"):
        compact([lower, upper])
    assert (len(upper), len(lower)) == (4, 6)
    with pytest.raises(CacheError, match="0 ranges"):
        compact([])


runs_strategy = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 12)).map(lambda run: (run[0], sum(run))),
    max_size=4,
).map(clean_runs)


@given(runs_strategy, st.integers(0, 8), st.integers(1, 8), st.integers(0, 40))
@settings(max_examples=150, deadline=None)
def test_window_length_is_the_greatest_that_a_scan_finds(
    held: tuple[tuple[int, int], ...], keep: int, span: int, limit: int
) -> None:
    for retention in (Retention(keep + span, keep), Retention()):
        usable = [
            length
            for length in range(limit + 1)
            if intersect_runs(held, retention.needed(length)) == retention.needed(length)
        ]
        assert window_length(held, retention.span, retention.keep, limit) == max(usable)


@given(
    st.lists(st.tuples(runs_strategy, st.integers(0, 3), st.integers(1, 6)), max_size=3),
    st.sets(st.integers(0, 40), max_size=5),
    st.booleans(),
    st.integers(0, 40),
)
@settings(max_examples=150, deadline=None)
def test_valid_length_agrees_with_a_scan(
    windows: list[tuple[tuple[tuple[int, int], ...], int, int]],
    checkpoints: set[int],
    stateful: bool,
    limit: int,
) -> None:
    leaves = [
        TokenLeaf("RotatingKVCache", (Plane("float32", 1, at + 1),), Retention(keep + span, keep))
        for at, (_, keep, span) in enumerate(windows)
    ]
    state = kinds.layout_of([_state_cache()]).nodes if stateful else ()
    layout = Layout((*leaves, *state))
    path = [_FakeRange(40, [held for held, _, _ in windows])]
    usable = [
        length
        for length in range(limit + 1)
        if all(
            intersect_runs(held, leaf.retention.needed(length)) == leaf.retention.needed(length)
            for (held, _, _), leaf in zip(windows, leaves, strict=True)
        )
        and (not stateful or length in checkpoints or length == 0)
    ]
    found = layout.valid_length(path, checkpoints, limit)
    assert found.length == max(usable)
    assert (found.reason is None) == (found.length == limit)


class _FakeRange:
    def __init__(self, stop: int, held: list[tuple[tuple[int, int], ...]]) -> None:
        self.stop = stop
        self.held = held

    def runs(self, group: int) -> tuple[tuple[int, int], ...]:
        return self.held[group]


def _state_cache() -> Any:
    cache = ArraysCache(1)
    cache[0] = mx.zeros((1, 2))
    return cache


def _random(tokens: int, heads: int = 2, dim: int = 32) -> tuple[mx.array, mx.array]:
    return mx.random.normal((1, heads, tokens, dim)), mx.random.normal((1, heads, tokens, dim))


def _filled(makers: list[Maker], tokens: int, heads: int = 2) -> list[Any]:
    caches = [make() for make in makers]
    for cache in caches:
        cache.update_and_fetch(*_random(tokens, heads))
    mx.eval([cache.state for cache in caches])
    return caches


def _extent(tokens: int) -> Extent:
    caches = _filled(MIXES["full"], tokens)
    return kinds.seal(caches, kinds.layout_of(caches), 0, tokens)


def _rows(span: ExtentRange, leaf: int) -> mx.array:
    [segment] = span.segments(leaf)
    rows = mx.stack(list(segment.planes))
    mx.eval(rows)
    return rows


def _bytes(cache: Any) -> int:
    return int(cache.nbytes)


def _active() -> int:
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()
