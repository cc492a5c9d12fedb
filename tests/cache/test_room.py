"""Making room: eviction, pins, hints, compaction, checkpoints, sinks."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from mlx_swarm.broker.cache import extents
from mlx_swarm.broker.cache.prefix_hash import Tokens
from mlx_swarm.broker.cache.prompt_cache import PromptCache
from mlx_swarm.broker.errors import CacheError
from tests.cache.fake_cold import OwnedSink, SyncSink
from tests.cache.helpers import TOKEN_BYTES, put, sequence, take, taken
from tests.cache.rows import build, contents, same
from tests.cache.world import Clock


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)


class TestEviction:
    def test_resident_sets_are_closed_towards_the_root(self) -> None:
        cache = PromptCache(40 * TOKEN_BYTES)
        for end in range(50, 60):
            put(cache, [*range(20), end, *range(10)])
            assert taken(cache, [*range(20), 99, 99]) == 20

    def test_a_pin_keeps_and_ends(self) -> None:
        cache = PromptCache(40 * TOKEN_BYTES, clock=(clock := Clock()))
        put(cache, sequence(1, 15))
        assert cache.pin(sequence(1, 10), ttl=5) == 10
        put(cache, sequence(2, 30))
        assert taken(cache, [*sequence(1, 15), 7]) == 10
        entry = cache.statistics().total
        assert entry.pinned_bytes == 10 * TOKEN_BYTES
        clock.now = 6
        put(cache, sequence(3, 40))
        clock.now = 3
        assert cache.statistics().total.pinned_bytes == 0
        assert taken(cache, [*sequence(1, 15), 7]) == 0

    def test_pinned_bytes_are_capped(self) -> None:
        cache = PromptCache(40 * TOKEN_BYTES)
        put(cache, sequence(1, 30))
        with pytest.raises(CacheError, match="would be pinned"):
            cache.pin(sequence(1, 30))
        assert cache.pin(sequence(1, 20)) == 20
        assert cache.pin([9, 9]) == 0

    def test_what_has_priority_leaves_last(self) -> None:
        cache = PromptCache(30 * TOKEN_BYTES)
        put(cache, sequence(1, 15))
        assert cache.prioritise([*sequence(1, 10), 99], 1) == 10
        for start in (2, 3, 4):
            put(cache, sequence(start, 15))
        assert taken(cache, [*sequence(1, 15), 7]) == 10
        assert cache.prioritise(sequence(4, 15), 2) == 15
        put(cache, sequence(5, 15))
        assert taken(cache, [*sequence(1, 15), 7]) == 0
        assert taken(cache, [*sequence(4, 15), 7]) == 15
        assert cache.prioritise([9, 9], 1) == 0

    def test_the_hint_of_a_next_use_keeps_a_leaf(self) -> None:
        cache = PromptCache(30 * TOKEN_BYTES, clock=(clock := Clock()))
        for start in (1, 2, 3):
            clock.now += 1
            put(cache, sequence(start, 10))
        cache.next_use(sequence(1, 10), 2.0)
        cache.next_use(sequence(3, 10), float("inf"))
        with take(cache, sequence(2, 10)) or pytest.fail("nothing taken") as lease:
            cache.next_use(lease, 5.0)
        put(cache, sequence(4, 10))
        assert cache.find_exact(sequence(3, 10)) is None
        assert cache.find_exact(sequence(1, 10)) is not None

    def test_a_pin_ends_when_it_is_taken_back(self) -> None:
        cache = PromptCache(30 * TOKEN_BYTES)
        put(cache, sequence(1, 10))
        cache.pin([*sequence(1, 10), 99])
        assert cache.unpin(sequence(1, 9)) == 0
        assert cache.statistics().total.pinned_bytes == 10 * TOKEN_BYTES
        assert cache.unpin(sequence(1, 10)) == 10
        assert cache.unpin(sequence(1, 10)) == 0
        assert cache.statistics().total.pinned_bytes == 0

    @pytest.mark.parametrize("instead", [False, True])
    def test_a_later_hint_can_take_the_place_of_those_before(self, instead: bool) -> None:
        cache = PromptCache(30 * TOKEN_BYTES, clock=(clock := Clock()))
        for start in (1, 2, 3):
            clock.now += 1
            put(cache, sequence(start, 10))
        cache.next_use(sequence(3, 10), 0.5)
        cache.next_use(sequence(3, 10), float("inf"), instead=instead)
        put(cache, sequence(4, 10))
        assert (cache.find_exact(sequence(3, 10)) is None) is instead

    def test_dead_parts_of_extents_are_reported_then_compacted(self) -> None:
        cache = PromptCache(100 * TOKEN_BYTES)
        put(cache, range(80))
        with take(cache, [*range(10), 99, 99]) or pytest.fail("nothing taken"):
            for start in (1, 2):
                put(cache, sequence(1000 + start, 45))
            assert cache.statistics().total.slack_bytes == 70 * TOKEN_BYTES
        put(cache, sequence(2000, 5))
        assert cache.statistics().total.slack_bytes == 0
        assert taken(cache, [*range(10), 99, 99]) == 10
        cache.check_integrity()

    def test_a_compaction_without_memory_leaves_everything_as_it_was(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cache = PromptCache(100 * TOKEN_BYTES)
        put(cache, range(80))
        lease = take(cache, [*range(10), 99, 99])
        assert lease is not None
        for start in (1, 2):
            put(cache, sequence(1000 + start, 45))
        with monkeypatch.context() as patch:
            patch.setattr(extents, "pack", lambda *_: 1 / 0)
            lease.release()
            with pytest.raises(ZeroDivisionError):
                put(cache, sequence(2000, 5))
        cache.check_integrity()
        put(cache, sequence(3000, 5))
        assert cache.statistics().total.slack_bytes == 0
        assert taken(cache, [*range(10), 99, 99]) == 10
        cache.check_integrity()

    def test_checkpoints_stay_in_their_budget(self) -> None:
        cache = PromptCache(2_000)
        for number in range(60):
            put(cache, [number % 20, *range(number % 9)], "state_only")
            total = cache.statistics().total
            assert total.checkpoint_bytes <= 1_000
        assert total.checkpoints_dropped > 0
        cache.check_integrity()


class TestSpill:
    def test_an_owned_sink_gets_clones_and_disposes_of_them(self) -> None:
        cache = PromptCache(20 * TOKEN_BYTES, spill=(sink := OwnedSink()))
        put(cache, sequence(1, 15))
        put(cache, sequence(2, 15))
        (lease,) = sink.leases
        assert lease.length == 15
        statistics = cache.statistics()
        assert statistics.departing_bytes == 15 * TOKEN_BYTES
        assert cache.total_bytes == 30 * TOKEN_BYTES
        lease.release()
        assert cache.total_bytes == 15 * TOKEN_BYTES
        assert cache.demotions == 1

    def test_a_sync_sink_sees_the_live_entry(self) -> None:
        cache = PromptCache(20 * TOKEN_BYTES, spill=(sink := SyncSink()))
        put(cache, sequence(1, 15))
        put(cache, sequence(2, 15))
        ((_, tokens, caches),) = sink.seen
        expected = contents(build("full", tokens.tolist()))
        assert all(same(a, b) for a, b in zip(contents(caches), expected, strict=True))
        assert cache.statistics().leases == 0

    @pytest.mark.parametrize("sink", [OwnedSink(), SyncSink()], ids=["owned", "sync"])
    def test_a_failing_sink_never_stops_eviction(
        self, sink: OwnedSink | SyncSink, caplog: pytest.LogCaptureFixture
    ) -> None:
        cache = PromptCache(20 * TOKEN_BYTES, spill=sink)
        sink.is_broken = True
        put(cache, sequence(1, 15))
        put(cache, sequence(2, 15))
        assert cache.total_bytes == 15 * TOKEN_BYTES
        total = cache.statistics().total
        assert (total.spill_failures, total.evictions, cache.demotions) == (1, 1, 0)
        assert cache.statistics().leases == 0
        assert "sink is broken" in caplog.text

    @pytest.mark.parametrize("call", ["take", "clear", "put"])
    def test_a_sink_that_changes_the_cache_counts_as_failed(
        self, call: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Meddler:
            def spill_sync(self, tokens: Tokens, caches: Sequence[Any], namespace: str) -> None:
                assert cache.find_exact(tokens) is not None
                calls: dict[str, Callable[[], object]] = {
                    "take": lambda: cache.take([*tokens, 7]),
                    "clear": cache.clear,
                    "put": lambda: cache.put(tokens, caches, "elsewhere"),
                }
                calls[call]()

        cache = PromptCache(20 * TOKEN_BYTES, spill=Meddler())
        for start in (1, 2, 3):
            assert put(cache, sequence(start, 15)).stored
            cache.check_integrity()
        assert cache.statistics().total.spill_failures == 2
        assert "may only read" in caplog.text

    def test_an_oversize_entry_is_handed_on_with_tokens_of_its_own(self) -> None:
        cache = PromptCache(20 * TOKEN_BYTES, spill=(sink := OwnedSink()))
        tokens = np.arange(25, dtype=np.uint32)
        assert cache.put(tokens, build("full", range(25))).refusal == "oversize"
        tokens[:] = 0
        (lease,) = sink.leases
        assert lease.tokens.tolist() == [*range(25)]
        lease.release()

    def test_clear_never_spills(self) -> None:
        cache = PromptCache(1 << 20, spill=(sink := SyncSink()))
        put(cache, range(20))
        cache.clear()
        assert not sink.seen

    def test_shrink_lets_go_of_as_much_as_is_asked_and_nothing_that_is_in_use(self) -> None:
        cache = PromptCache(1 << 20)
        for start in (1, 2, 3):
            put(cache, sequence(start, 10))
        assert cache.shrink(15 * TOKEN_BYTES)
        assert cache.total_bytes == 10 * TOKEN_BYTES
        with take(cache, [*sequence(3, 10), 7]) or pytest.fail("nothing taken"):
            assert not cache.shrink(1 << 20)
            assert cache.total_bytes == 10 * TOKEN_BYTES
        assert cache.shrink(1)
        assert cache.total_bytes == 0
        assert not cache.shrink(1)
        cache.check_integrity()

    def test_shrink_hands_what_leaves_to_the_sink(self) -> None:
        cache = PromptCache(1 << 20, spill=(sink := OwnedSink()))
        put(cache, sequence(1, 10))
        assert cache.shrink(1)
        (lease,) = sink.leases
        lease.release()
        assert cache.total_bytes == 0

    def test_demote_idle_goes_to_the_sink_or_does_nothing(self) -> None:
        clock = Clock()
        alone = PromptCache(1 << 20, clock=clock)
        cache = PromptCache(1 << 20, spill=(sink := SyncSink()), clock=clock)
        for each in (alone, cache):
            put(each, sequence(1, 10))
        clock.now = 10
        for each in (alone, cache):
            put(each, sequence(2, 10))
        assert alone.demote_idle(5) == 0
        assert cache.demote_idle(5, now=12) == 1
        assert len(sink.seen) == 1
        assert cache.find_exact(sequence(2, 10)) is not None
