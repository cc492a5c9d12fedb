"""The prompt cache's rules, one by one. Random lives are in test_stateful.py."""

import gc
import logging
import random
import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchKVCache, KVCache

from mlx_swarm.broker.cache.eviction import LRU
from mlx_swarm.broker.cache.intake import CacheRow
from mlx_swarm.broker.cache.prompt_cache import PromptCache, PromptLease
from mlx_swarm.broker.errors import CacheError, InvalidRequest, UnsupportedCacheKind
from mlx_swarm.broker.trace.events import Evicted, Put, Split
from mlx_swarm.broker.trace.recorder import Recorder
from tests.cache.fake_cold import SyncSink
from tests.cache.helpers import TOKEN_BYTES, large, put, sequence, take, taken
from tests.cache.oracle import LinearPromptCache
from tests.cache.rows import advance, build, contents, same
from tests.cache.world import Clock


@pytest.fixture
def cache() -> PromptCache:
    return PromptCache(1 << 30)


class TestPut:
    def test_stores_only_what_is_new(self, cache: PromptCache) -> None:
        assert put(cache, range(20)) == (20, 20 * TOKEN_BYTES, None)
        assert put(cache, [*range(15), 7, 7]) == (2, 2 * TOKEN_BYTES, None)
        assert put(cache, range(30)) == (10, 10 * TOKEN_BYTES, None)
        assert cache.total_bytes == 32 * TOKEN_BYTES

    def test_a_duplicate_drops_the_new_copy_and_refreshes_recency(self) -> None:
        cache = PromptCache(20 * TOKEN_BYTES, policy=LRU(), clock=(clock := Clock()))
        for start in (1, 2):
            clock.now += 1
            put(cache, sequence(start, 10))
        clock.now += 1
        assert put(cache, sequence(1, 10)) == (0, 0, None)
        put(cache, sequence(3, 10))
        assert cache.find_exact(sequence(1, 10)) is not None
        assert cache.find_exact(sequence(2, 10)) is None

    def test_a_duplicate_adds_a_missing_checkpoint(self, cache: PromptCache) -> None:
        put(cache, range(20), "state")
        assert taken(cache, [*range(12), 7], "state") == 0
        assert put(cache, range(12), "state").new_tokens == 0
        assert taken(cache, [*range(12), 7], "state") == 12

    def test_the_caller_keeps_its_caches(self, cache: PromptCache) -> None:
        caches = build("full", range(20))
        before = contents(caches)
        cache.put(range(20), caches)
        assert all(same(a, b) for a, b in zip(before, contents(caches), strict=True))
        advance(caches, [*range(20), 7], 20)
        assert taken(cache, [*range(20), 9]) == 20

    @pytest.mark.parametrize(
        ("tokens", "caches", "error"),
        [
            ([], build("full", [1]), CacheError),
            (range(9), build("full", range(8)), CacheError),
            (range(8), build("quantized", range(8)), CacheError),
            (range(8), [KVCache()], CacheError),
            (range(8), [BatchKVCache([0])], UnsupportedCacheKind),
            ([-1], build("full", [1]), InvalidRequest),
        ],
        ids=["empty", "offset", "layout", "unfilled", "kind", "tokens"],
    )
    def test_a_rejected_put_changes_nothing(
        self, cache: PromptCache, tokens: Any, caches: list[Any], error: type[Exception]
    ) -> None:
        put(cache, [5, 6, 7])
        with pytest.raises(error):
            cache.put(tokens, caches)
        assert cache.total_bytes == 3 * TOKEN_BYTES
        cache.check_integrity()

    def test_a_lease_of_other_tokens_is_rejected(self, cache: PromptCache) -> None:
        put(cache, range(20))
        with take(cache, range(20)) or pytest.fail("nothing taken") as lease:
            with pytest.raises(CacheError, match="do not begin"):
                cache.put([9, 9], build("full", [9, 9]), lease=lease)
            with pytest.raises(CacheError, match="namespace"):
                cache.put(range(20), build("full", range(20)), "other", lease)

    def test_takes_a_row(self, cache: PromptCache) -> None:
        class Row(CacheRow):
            length = 20

        cache.put(range(20), Row(build("full", range(20))))
        assert taken(cache, range(30)) == 20
        with pytest.raises(CacheError, match="20 tokens"):
            cache.put(range(21), Row(build("full", range(21))))

    def test_an_oversize_entry_leaves_the_others_alone(self) -> None:
        cache = PromptCache(20 * TOKEN_BYTES, spill=(sink := SyncSink()))
        put(cache, sequence(1, 10))
        assert put(cache, sequence(2, 21)).refusal == "oversize"
        assert cache.find_exact(sequence(1, 10)) is not None
        assert [len(each.tokens) for each in sink.seen] == [21]

    def test_calls_on_put_and_contains_its_errors(
        self, cache: PromptCache, caplog: pytest.LogCaptureFixture
    ) -> None:
        seen: list[tuple[str, int]] = []
        cache.on_put = lambda namespace, tokens: seen.append((namespace, len(tokens)))
        put(cache, range(5), namespace="a")

        def broken(*_: object) -> None:
            raise ValueError("broken hook")

        cache.on_put = broken
        assert put(cache, range(9), namespace="a").stored
        assert seen == [("a", 5)]
        assert "broken hook" in caplog.text

    def test_everything_is_called_from_one_thread(self, cache: PromptCache) -> None:
        put(cache, range(5))
        lease = take(cache, range(5))
        assert lease is not None
        calls: list[Callable[[], object]] = [
            lambda: cache.plan(range(5)),
            lambda: cache.peek_prefix_len(range(5)),
            lambda: cache.find_exact(range(5)),
            lambda: cache.put_points(range(5)),
            lambda: cache.put(range(5), []),
            cache.statistics,
            cache.clear,
            lease.release,
        ]
        failures: list[str] = []

        def elsewhere() -> None:
            for call in calls:
                try:
                    call()
                except AssertionError as error:
                    failures.append(str(error))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert ["owned by thread" in failure for failure in failures] == [True] * len(calls)

    def test_another_layout_may_follow_once_a_namespace_is_cleared(
        self, cache: PromptCache
    ) -> None:
        put(cache, range(5))
        lease = take(cache, range(5))
        assert lease is not None
        with pytest.raises(CacheError, match="the namespace has KVCache"):
            put(cache, range(5), "state")
        cache.clear()
        assert put(cache, range(5), "state").stored
        assert taken(cache, range(6), "state") == 5
        lease.release()
        cache.check_integrity()


class TestPlan:
    def test_changes_nothing(self, cache: PromptCache) -> None:
        put(cache, range(20))
        before = cache.statistics()
        cache.plan([*range(7), 9, 9])
        cache.plan(range(7), "nowhere")
        cache.peek_prefix_len([*range(7), 9, 9])
        assert cache.statistics() == before

    def test_every_miss_and_short_hit_has_a_reason(self) -> None:
        cache = PromptCache(30 * TOKEN_BYTES)
        assert cache.plan(range(9)).reason == "cold_start"
        put(cache, range(100, 120))
        assert cache.plan([100]).reason == "below_minimum"
        assert cache.plan(range(100, 120)).reason is None
        assert cache.plan(range(100, 130)).reason == "cold_start"
        assert cache.plan([*range(100, 110), 7, 7]).reason == "diverged"
        assert cache.plan(range(100, 120), "other").reason == "namespace"
        put(cache, range(200, 220))
        assert cache.plan(range(100, 120)).reason == "evicted"

    def test_reasons_are_counted_by_takes(self, cache: PromptCache) -> None:
        put(cache, range(20))
        for prompt in (range(20), [*range(9), 7, 7], [5, 5, 5]):
            taken(cache, prompt)
        total = cache.statistics().total
        assert (total.hits, total.misses, cache.hits, cache.misses) == (2, 1, 2, 1)
        assert total.reasons == {"diverged": 2}
        assert (total.hit_tokens, total.missed_tokens) == (28, 6)

    def test_names_its_donor(self, cache: PromptCache) -> None:
        put(cache, range(20))
        entry = cache.find_exact(range(20))
        assert entry is not None
        assert cache.plan([*range(9), 7]).donor == entry.name

    def test_put_points_of_layers_that_cannot_be_cut(self, cache: PromptCache) -> None:
        put(cache, range(20), "state")
        put(cache, range(20), namespace="full")
        prompt = [*range(12), 7, *range(5000)]
        assert cache.put_points(prompt, "", [5, 9000]) == (5, 12, 2048, 4096)
        assert cache.put_points(prompt, "full", [5, 15]) == (15,)


class TestLease:
    def test_releasing_twice_is_harmless(self, cache: PromptCache) -> None:
        put(cache, range(20))
        lease = take(cache, range(20))
        assert lease is not None
        lease.release()
        lease.release()
        assert lease.released
        assert cache.statistics().leases == 0

    def test_outlives_clear_and_is_charged_until_released(self, cache: PromptCache) -> None:
        put(cache, range(20))
        lease = take(cache, range(20))
        assert lease is not None
        cache.clear()
        assert cache.total_bytes == cache.statistics().total.leased_bytes == 20 * TOKEN_BYTES
        assert taken(cache, range(20)) == 0
        advance(lease.caches, range(20), 19)
        assert cache.put(range(20), lease.caches, lease=lease).new_tokens == 20
        lease.release()
        assert cache.total_bytes == 20 * TOKEN_BYTES
        cache.check_integrity()

    def test_is_never_evicted(self) -> None:
        cache = PromptCache(30 * TOKEN_BYTES)
        put(cache, sequence(1, 20))
        lease = take(cache, [*sequence(1, 20), 7])
        assert lease is not None
        assert put(cache, sequence(2, 20)).refusal == "no_room"
        assert taken(cache, [*sequence(1, 20), 7]) == 20
        lease.release()
        assert put(cache, sequence(2, 20)).stored

    def test_keeps_only_what_it_reads(self) -> None:
        cache = PromptCache(40 * TOKEN_BYTES)
        put(cache, sequence(1, 30))
        with take(cache, [*sequence(1, 5), 77, 7]) or pytest.fail("nothing taken"):
            put(cache, sequence(2, 10))
            assert put(cache, sequence(3, 10)).stored
            assert taken(cache, [*sequence(1, 30), 7]) == 5


class TestTelling:
    def test_statistics_add_up_over_namespaces(self, cache: PromptCache) -> None:
        put(cache, range(20), namespace="a")
        put(cache, range(30), "state", "b")
        taken(cache, range(9), namespace="a")
        statistics = cache.statistics()
        each = statistics.namespaces.values()
        assert statistics.total == sum(each, start=type(statistics.total)())
        assert statistics.total.total_bytes == cache.total_bytes
        assert statistics.total.tokens == 50

    def test_the_trace_hears_of_entries(self) -> None:
        with Recorder() as trace:
            cache = PromptCache(40 * TOKEN_BYTES, trace=trace)
            put(cache, range(20))
            put(cache, [*range(15), 7, 7], namespace="")
            put(cache, sequence(5, 30))
            events = trace.events()
        puts = [event for event in events if isinstance(event, Put)]
        assert [(each.tokens, each.new_tokens) for each in puts] == [(20, 20), (17, 2), (30, 30)]
        (split,) = [event for event in events if isinstance(event, Split)]
        assert (split.at, split.entry) == (15, puts[0].entry)
        evicted = [event for event in events if isinstance(event, Evicted)]
        assert sum(each.tokens for each in evicted) >= 7

    def test_reported_bytes_are_what_mlx_holds(self) -> None:
        cache = PromptCache(30 << 20)
        gc.collect()
        base = mx.get_active_memory()

        def differs() -> float:
            mx.synchronize()
            held = mx.get_active_memory() - base
            return abs(held - cache.total_bytes) / max(held, 1)

        for start in (1, 2, 3):
            key = sequence(start, 1200)
            cache.put(key, large(1200))
            assert differs() < 0.02
            lease = cache.take([*key[: 200 * start], 99, 99])
            assert differs() < 0.02
            assert lease is not None
            lease.release()
        cache.put(sequence(9, 1000), large(1000))
        assert cache.statistics().total.evictions > 0
        assert differs() < 0.02
        cache.clear()
        assert mx.get_active_memory() == base

    def test_reported_bytes_are_what_mlx_holds_in_a_random_life(self) -> None:
        chance = random.Random(5)
        cache = PromptCache(12 << 20)
        gc.collect()
        base = mx.get_active_memory()
        leases: list[PromptLease] = []
        for _ in range(60):
            key = sequence(chance.randint(1, 6), chance.randint(64, 700))
            key[chance.randint(1, len(key) - 1)] += chance.randint(0, 1)
            match chance.randint(0, 5):
                case 0 if leases:
                    leases.pop().release()
                case 1 if (lease := cache.take(key)) is not None:
                    leases.append(lease)
                    del lease
                case 2 if chance.random() < 0.2:
                    cache.clear()
                case _:
                    cache.put(key, large(len(key)))
            mx.synchronize()
            held = mx.get_active_memory() - base
            assert abs(held - cache.total_bytes) <= 0.02 * held
        assert cache.statistics().total.evictions > 5

    def test_the_oracle_can_stand_in(self) -> None:
        for family in ("full", "window", "state", "quantized", "nested"):
            oracle = LinearPromptCache()
            oracle.put(range(30), build(family, range(30)))
            lease = oracle.take([*range(30), 7])
            assert lease is not None
            found, expected = contents(lease.caches), contents(build(family, range(30)))
            assert all(same(a, b) for a, b in zip(found, expected, strict=True))


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
