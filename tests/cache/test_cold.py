"""The cold side of the prompt cache, with a fake store: restores, writes, and their failures."""

import logging
import threading

import pytest
from msgspec.structs import replace

from mlx_swarm.broker.cache.cold import ColdMatch, ColdWrite, Restored
from mlx_swarm.broker.cache.eviction import LRU
from mlx_swarm.broker.cache.kinds import materialise
from mlx_swarm.broker.cache.ledger import Ledger, Purpose
from mlx_swarm.broker.cache.node import Node
from mlx_swarm.broker.cache.prefix_hash import Tokens
from mlx_swarm.broker.cache.prompt_cache import PromptCache
from mlx_swarm.broker.errors import ColdStoreBusy
from tests.cache.fake_cold import FakeColdStore
from tests.cache.helpers import TOKEN_BYTES, put, sequence, take, taken
from tests.cache.rows import build
from tests.cache.world import Clock


@pytest.fixture
def store() -> FakeColdStore:
    return FakeColdStore()


@pytest.fixture
def cache(store: FakeColdStore) -> PromptCache:
    return PromptCache(1 << 20, cold=store)


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)


class TestRestore:
    def test_serves_what_is_strictly_longer_than_ram_and_promotes_it(
        self, cache: PromptCache, store: FakeColdStore
    ) -> None:
        put(cache, range(10))
        name = store.add("", range(20), build("full", range(20)))
        prompt = [*range(20), 7]
        plan = cache.plan(prompt)
        assert (plan.ram_tokens, plan.cold_tokens, plan.reason) == (10, 10, None)
        lease = take(cache, prompt)
        assert lease is not None
        assert (lease.ram_tokens, lease.cold_tokens) == (10, 10)
        assert (cache.hits, cache.misses) == (1, 0)
        lease.release()
        assert taken(cache, prompt) == 20
        assert store.restored == [name]
        cache.check_integrity()

    def test_leaves_an_equally_long_cold_entry_alone(
        self, cache: PromptCache, store: FakeColdStore
    ) -> None:
        put(cache, range(20))
        store.add("", range(20), build("full", range(20)))
        assert taken(cache, [*range(20), 7]) == 20
        assert not store.restored

    def test_counts_as_a_miss_where_ram_has_nothing(
        self, cache: PromptCache, store: FakeColdStore
    ) -> None:
        store.add("", range(20), build("full", range(20)))
        assert taken(cache, [*range(20), 7]) == 20
        assert (cache.hits, cache.misses) == (0, 1)
        assert cache.statistics().total.restores == 1

    def test_is_shared_by_all_who_need_it(self, cache: PromptCache, store: FakeColdStore) -> None:
        store.add("", range(20), build("full", range(20)))
        prompts = [[*range(20), agent] for agent in range(50, 54)]
        restorations = [cache.restoration(prompt) for prompt in prompts]
        threads = [threading.Thread(target=each.run) for each in restorations if each is not None]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        leases = [cache.lease(p, "", r) for p, r in zip(prompts, restorations, strict=True)]
        assert [lease.length for lease in leases if lease is not None] == [20] * 4
        assert len(store.restored) == 1
        assert cache.statistics().total.restores == 1

    def test_drops_what_is_unusable_loudly_and_serves_ram(
        self, cache: PromptCache, store: FakeColdStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        put(cache, range(10))
        store.unreadable.add(store.add("", range(20), build("full", range(20))))
        store.add("", range(15), build("quantized", range(15)))
        for prompt in ([*range(20), 7], [*range(15), 8]):
            lease = take(cache, prompt)
            assert lease is not None
            assert (lease.length, lease.plan.reason) == (10, "restore_failed")
            lease.release()
        assert len(store.deleted) == 2
        assert not store.entries
        assert "is corrupt" in caplog.text
        assert cache.statistics().total.restore_failures == 2

    def test_is_left_when_computing_is_faster(self, store: FakeColdStore) -> None:
        clock = Clock()
        cache = PromptCache(1 << 20, cold=store, clock=clock)
        store.add("", range(100, 120), build("full", range(100, 120)))
        restoration = cache.restoration([*range(100, 120), 7])
        assert restoration is not None
        cache.note_prefill(1000, 1.0)
        slow = store.restore

        def restore(match: object) -> object:
            clock.now += 60
            return slow(match)  # type: ignore[arg-type]

        store.restore = restore  # type: ignore[method-assign, assignment]
        restoration.run()
        store.add("", range(200, 220), build("full", range(200, 220)))
        plan = cache.plan([*range(200, 220), 7])
        assert (plan.usable_tokens, plan.reason) == (0, "cost_gate")
        # How fast another model computes says nothing about this one.
        cache.note_prefill(1, 1e9, ["another"])
        assert cache.plan([*range(200, 220), 7]).reason == "cost_gate"
        cache.note_prefill(1, 1e9)
        cache.note_prefill(1, 1e9)
        for _ in range(60):
            cache.note_prefill(1, 1e9)
        assert cache.plan([*range(200, 220), 7]).cold_tokens == 20

    def test_does_not_count_where_ram_has_no_room_for_it(self, store: FakeColdStore) -> None:
        cache = PromptCache(30 * TOKEN_BYTES, cold=store)
        put(cache, sequence(1, 20))
        name = store.add("", sequence(2, 20), materialise(build("full", sequence(2, 20))))
        with take(cache, [*sequence(1, 20), 7]) or pytest.fail("nothing taken"):
            assert cache.take([*sequence(2, 20), 7]) is None
        total = cache.statistics().total
        assert (total.restores, total.unstored, total.restore_failures) == (0, 1, 0)
        assert total.reasons["restore_failed"] == 1
        assert store.released == [name]

    def test_is_not_waited_for_if_the_caller_says_so(
        self, cache: PromptCache, store: FakeColdStore
    ) -> None:
        put(cache, range(10))
        store.add("", range(20), build("full", range(20)))
        with cache.lease([*range(20), 7]) or pytest.fail("nothing taken") as lease:
            assert (lease.length, lease.plan.reason) == (10, "not_worth_waiting")

    def test_the_release_hook_runs_once_after_donor_and_clones_are_gone(
        self, cache: PromptCache, store: FakeColdStore
    ) -> None:
        name = store.add("", range(20), build("full", range(20)))
        lease = take(cache, [*range(20), 7])
        other = take(cache, [*range(20), 8])
        assert lease is not None
        assert other is not None
        cache.clear()
        lease.release()
        assert not store.released
        other.release()
        other.release()
        assert store.released == [name]

    def test_a_store_that_fails_to_look_up_has_nothing(
        self, cache: PromptCache, store: FakeColdStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        def find(*_: object) -> None:
            raise OSError("index is broken")

        store.find = find  # type: ignore[method-assign, assignment]
        put(cache, range(10))
        assert taken(cache, range(10)) == 9
        assert taken(cache, range(12)) == 10
        assert "index is broken" in caplog.text


class TestWrite:
    def test_a_node_leaves_ram_once_it_is_covered(self, store: FakeColdStore) -> None:
        store.is_slow = True
        cache = PromptCache(20 * TOKEN_BYTES, cold=store)
        put(cache, sequence(1, 15))
        put(cache, sequence(2, 8))
        assert cache.total_bytes == 23 * TOKEN_BYTES
        assert cache.statistics().total.undurable_bytes == 23 * TOKEN_BYTES
        store.finish()
        assert put(cache, sequence(3, 4)).stored
        assert cache.total_bytes <= 20 * TOKEN_BYTES
        assert cache.demotions >= 1
        assert cache.plan([*sequence(1, 15), 7]).cold_tokens == 15
        cache.check_integrity()

    def test_a_failed_write_leaves_its_node_resident(
        self, store: FakeColdStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        cache = PromptCache(20 * TOKEN_BYTES, cold=store)
        store.is_full = True
        put(cache, sequence(1, 15))
        assert put(cache, sequence(2, 8)).stored
        assert cache.find_exact(sequence(1, 15)) is not None
        assert cache.statistics().total.evictions == 0
        assert "disk full" in caplog.text

    def test_a_failed_write_is_tried_again_after_a_while_and_not_before(
        self, store: FakeColdStore
    ) -> None:
        clock = Clock()
        cache = PromptCache(1 << 20, cold=store, clock=clock)
        store.is_full = True
        for start in (1, 2):
            put(cache, sequence(start, 30))
        assert cache.write_behind()
        assert store.offered == 1
        assert not cache.write_behind()
        clock.now += 60
        assert cache.write_behind()
        assert not cache.write_behind()
        assert store.offered == 2
        store.is_full = False
        clock.now += 60
        while cache.write_behind():
            pass
        assert len(store.entries) == 2
        assert cache.demote_idle(0) == 2

    @pytest.mark.parametrize("fault", ["is_full", "is_refusing"])
    def test_after_repeated_failures_eviction_goes_on_without_the_store(
        self, store: FakeColdStore, fault: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        cache = PromptCache(20 * TOKEN_BYTES, cold=store)
        setattr(store, fault, True)
        for start in range(1000, 1010):
            put(cache, sequence(start, 12))
        assert cache.find_exact(sequence(1009, 12)) is not None
        assert cache.total_bytes <= 20 * TOKEN_BYTES
        assert cache.demotions == 0
        assert cache.statistics().total.evictions > 0
        assert "unavailable" in caplog.text
        # What has left is not kept in mind to be written.
        cache.check_integrity()

    def test_demotes_idle_nodes_and_keeps_them_reachable(self, store: FakeColdStore) -> None:
        clock = Clock()
        cache = PromptCache(1 << 20, cold=store, clock=clock)
        put(cache, [*range(20), 1])
        put(cache, [*range(20), 2, 3])
        assert cache.demote_idle(5) == 0
        clock.now = 10
        assert cache.demote_idle(5) == 3
        assert cache.total_bytes == 0
        assert taken(cache, [*range(20), 2, 3, 4]) == 22

    def test_shrinks_only_by_what_the_store_has(self, store: FakeColdStore) -> None:
        store.is_slow = True
        cache = PromptCache(1 << 20, cold=store)
        put(cache, range(20))
        held = cache.total_bytes
        assert cache.shrink(1)
        assert cache.shrink(1)
        assert cache.total_bytes == held
        store.finish()
        assert cache.shrink(1)
        assert cache.total_bytes == 0
        assert not cache.shrink(1)
        assert taken(cache, [*range(20), 7]) == 20

    def test_a_slow_write_is_demoted_at_a_later_call(self, store: FakeColdStore) -> None:
        store.is_slow = True
        cache = PromptCache(1 << 20, cold=store)
        put(cache, range(20))
        assert cache.demote_idle(0) == 0
        with take(cache, [*range(20), 7]) or pytest.fail("nothing taken"):
            store.finish()
            assert cache.demote_idle(0) == 0
        assert cache.demote_idle(0) == 1
        assert len(store.entries) == 1

    def test_flush_writes_all_and_says_what_only_ram_has(self, store: FakeColdStore) -> None:
        for cold in (store, None):
            cache = PromptCache(1 << 20, cold=cold)
            put(cache, [*range(20), 1])
            put(cache, [*range(20), 2, 3])
            left = cache.flush(10)
            assert left == ((0, 0) if cold is not None else (3, 23 * TOKEN_BYTES))
        store.is_full = True
        cache = PromptCache(1 << 20, cold=store)
        put(cache, range(50, 60))
        assert cache.flush(10) == (1, 10 * TOKEN_BYTES)

    def test_an_oversize_entry_goes_to_the_store_alone(self, store: FakeColdStore) -> None:
        cache = PromptCache(20 * TOKEN_BYTES, cold=store)
        assert put(cache, sequence(1, 25)).refusal == "oversize"
        assert len(store.entries) == 1
        assert cache.total_bytes == 0
        cache.plan([1])

    def test_checkpoints_without_room_in_ram_go_to_the_store(self, store: FakeColdStore) -> None:
        cache = PromptCache(2_000, cold=store)
        for start in range(1000, 1030):
            assert put(cache, sequence(start, 5), "state_only").stored
        assert cache.statistics().total.checkpoints_dropped > 0
        for start in range(1000, 1030):
            assert cache.plan([*sequence(start, 5), 7]).usable_tokens == 5
        cache.check_integrity()

    def test_clearing_while_a_write_is_in_flight(self, store: FakeColdStore) -> None:
        store.is_slow = True
        cache = PromptCache(1 << 20, cold=store)
        put(cache, range(20))
        cache.demote_idle(0)
        cache.clear()
        store.finish()
        assert taken(cache, [*range(20), 7]) == 20
        cache.check_integrity()
        assert cache.statistics().leases == 0


class WatchedStore(FakeColdStore):
    """Notes the most that the ledger has promised while it is read."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger
        self.most = 0

    def find(self, tokens: Tokens, namespace: str, held: int = 0) -> ColdMatch | None:
        match = super().find(tokens, namespace, held)
        return match and replace(match, bytes=match.length * TOKEN_BYTES)

    def restore(self, match: ColdMatch) -> Restored:
        self.most = max(self.most, self.ledger.total)
        return super().restore(match)


class TestMemoryForReading:
    def test_others_leave_for_it_and_never_what_it_continues(self) -> None:
        ledger = Ledger(60 * TOKEN_BYTES)
        store = WatchedStore(ledger)
        cache = PromptCache(1 << 20, cold=store, ledger=ledger)
        put(cache, range(10))
        put(cache, range(100, 145))
        store.add("", range(20), build("full", range(20)))
        assert taken(cache, [*range(20), 7]) == 20
        assert taken(cache, [*range(10), 99]) == 10
        assert 0 < store.most <= ledger.limit
        assert cache.statistics().total.restores == 1
        assert ledger.used(Purpose.RESTORES) == 0

    def test_without_any_the_rest_is_computed(self) -> None:
        ledger = Ledger(60 * TOKEN_BYTES)
        store = WatchedStore(ledger)
        cache = PromptCache(1 << 20, cold=store, ledger=ledger)
        put(cache, range(10))
        store.add("", range(30), build("full", range(30)))
        row = ledger.reserve(Purpose.TAILS, 45 * TOKEN_BYTES)
        lease = take(cache, [*range(30), 7])
        assert lease is not None
        assert (lease.length, lease.plan.reason) == (10, "not_worth_waiting")
        lease.release()
        assert not store.restored
        assert cache.statistics().total.restores_refused == 1
        row.cancel()
        assert taken(cache, [*range(30), 7]) == 30
        assert store.most <= ledger.limit

    def test_is_promised_once_for_all_who_wait_and_given_back_whatever_comes(self) -> None:
        ledger = Ledger(1 << 20)
        store = WatchedStore(ledger)
        cache = PromptCache(1 << 20, cold=store, ledger=ledger)
        name = store.add("", range(20), build("full", range(20)))
        prompts = [[*range(20), agent] for agent in range(50, 53)]
        readings = [cache.restoration(prompt) for prompt in prompts]
        assert ledger.used(Purpose.RESTORES) == 20 * TOKEN_BYTES
        assert cache.is_reading
        store.unreadable.add(name)
        for prompt, reading in zip(prompts, readings, strict=True):
            assert reading is not None
            reading.run()
            assert cache.lease(prompt, "", reading) is None
        assert not cache.is_reading
        assert ledger.total == 0


class BusyStore(FakeColdStore):
    """Takes one write at a time."""

    def store(self, write: ColdWrite) -> None:
        self.offered += bool(self.queue)
        if self.queue:
            raise ColdStoreBusy("one after the other")
        super().store(write)


def test_a_busy_store_is_not_asked_again_before_a_write_has_ended() -> None:
    store = BusyStore(is_slow=True)
    cache = PromptCache(1 << 20, cold=store)
    for number in range(3):
        put(cache, range(100 * number, 100 * number + 20))
    assert cache.write_behind()
    for _ in range(5):
        assert not cache.write_behind()
    assert store.offered == 2
    for _ in range(4):
        store.finish(1)
        cache.write_behind()
    cache.check_integrity()
    assert len(store.entries) == 3


class CountingLRU(LRU):
    """Counts the leaves that are looked at."""

    looked_at = 0

    def leaving(self, node: Node) -> None:
        self.looked_at += 1


@pytest.mark.parametrize("fails", [False, True])
def test_leaves_that_wait_for_the_store_are_not_gone_through_at_every_put(fails: bool) -> None:
    store, policy, clock = FakeColdStore(is_slow=True), CountingLRU(), Clock()
    cache = PromptCache(200 * 20 * TOKEN_BYTES, cold=store, policy=policy, clock=clock)
    for number in range(500):
        clock.now += 1
        put(cache, [number + 7, *range(1, 20)])
    # Each is looked at once, but for those few that come and go while the store is full.
    assert policy.looked_at < 4 * 500
    cache.check_integrity()
    store.is_full = fails
    for number in range(500, 520):
        store.finish()
        clock.now += 1
        put(cache, [number + 7, *range(1, 20)])
        cache.check_integrity()
    # What was passed over can leave all the same, written or, without a store, lost.
    total = cache.statistics().total
    assert cache.total_bytes <= cache.max_bytes + cache.max_bytes // 4
    assert total.demotions > 20 or (fails and total.evictions > 20)
    assert taken(cache, [519 + 7, *range(1, 20), 7]) == 20
