"""Faults that users of other prompt caches reported, as the behaviours that exclude them."""

import logging
from collections.abc import Iterator

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache

from mlx_swarm.broker.cache.eviction import LRU
from mlx_swarm.broker.cache.kinds import materialise
from mlx_swarm.broker.cache.ledger import Ledger, Purpose
from mlx_swarm.broker.cache.prompt_cache import PromptCache
from tests.cache.fake_cold import FakeColdStore
from tests.cache.helpers import TOKEN_BYTES, holds, large, put, sequence, take, taken, turn
from tests.cache.rows import FAMILIES, advance, build, contents, same
from tests.cache.world import constant_hashes

RING_AND_STATE = [
    "window",
    "window_keep",
    "chunked",
    "state",
    "state_only",
    "nested",
    "nested_twice",
]


@pytest.fixture
def cache() -> PromptCache:
    return PromptCache(1 << 30)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_prompt_equal_to_a_stored_key_leaves_one_token_to_forward(
    cache: PromptCache, family: str
) -> None:
    put(cache, range(9), family)
    put(cache, range(10), family)
    lease = take(cache, range(10), family)
    assert lease is not None
    assert lease.length == 9
    advance(lease.caches, range(10), 9)
    assert holds(lease, range(10), family)


def test_take_refreshes_recency_so_that_a_hot_donor_outlives_newer_entries() -> None:
    cache = PromptCache(20 * TOKEN_BYTES, policy=LRU())
    hot = sequence(1000, 10)
    put(cache, hot)
    for start in range(2000, 2010):
        assert taken(cache, [*hot, 7]) == 10
        put(cache, sequence(start, 10))


def test_a_short_entry_never_hides_a_longer_common_prefix(cache: PromptCache) -> None:
    put(cache, range(900))
    put(cache, range(3))
    assert taken(cache, [*range(890), 7, 7]) == 890


def test_a_layer_that_cannot_be_cut_is_refused_with_its_reason(cache: PromptCache) -> None:
    caches = build("window", range(40), chunk=1)
    cache.put(range(40), caches)
    plan = cache.plan([*range(30), 99, 99])
    assert (plan.ram_tokens, plan.reason) == (0, "window_gone")
    assert take(cache, [*range(30), 99, 99], "window") is None


@pytest.mark.parametrize("family", RING_AND_STATE)
def test_five_turns_hit_five_times_on_ring_and_state_models(
    cache: PromptCache, family: str
) -> None:
    history = sequence(1, 30)
    turn(cache, history, family)
    for number in range(5):
        ended = len(history)
        history = [*history, *sequence(50 + number, 12)]
        assert turn(cache, history, family) == ended


@pytest.mark.parametrize("family", RING_AND_STATE)
def test_agents_that_share_marked_instructions_hit_there(cache: PromptCache, family: str) -> None:
    instructions = sequence(1, 25)
    assert turn(cache, [*instructions, 100, 101, 102], family, [25]) == 0
    for agent in range(200, 204):
        assert turn(cache, [*instructions, agent, 101], family, [25]) == 25


@pytest.mark.parametrize("family", RING_AND_STATE)
def test_the_second_divergent_agent_pays_and_the_third_hits(
    cache: PromptCache, family: str
) -> None:
    shared = sequence(1, 40)
    turn(cache, [*shared, 100, *range(20)], family)
    assert turn(cache, [*shared, 200, 201], family) < 40
    assert turn(cache, [*shared, 300, 301], family) == 40


def test_take_never_consumes_the_donor(cache: PromptCache) -> None:
    put(cache, range(100))
    assert taken(cache, [*range(20), 7]) == 20
    assert taken(cache, [*range(100), 7]) == 100


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_donor_is_bit_identical_after_its_clones_decoded_trimmed_and_ended(
    cache: PromptCache, family: str
) -> None:
    put(cache, range(30), family)
    leases = [take(cache, [*range(30), 7], family) for _ in range(20)]
    for number, lease in enumerate(leases):
        assert lease is not None
        tokens = [*range(30), *range(number, number + 5)]
        advance(lease.caches, tokens, 30)
        assert holds(lease, tokens, family)
        if all(each.is_trimmable() for each in lease.caches):
            assert [each.trim(7) for each in lease.caches] == [7] * len(lease.caches)
        lease.release()
    lease = take(cache, [*range(30), 7], family)
    assert lease is not None
    cache.check_integrity()


def test_namespaces_with_equal_tokens_never_share_kv(cache: PromptCache) -> None:
    key = list(range(20))
    other = build("full", [7, *range(1, 20)])
    for _ in range(5):
        cache.put(key, build("full", key), "adapter-a")
        cache.put(key, other, "adapter-b")
        for namespace, expected in (("adapter-a", build("full", key)), ("adapter-b", other)):
            with cache.take([*key, 9], namespace) or pytest.fail("nothing taken") as lease:
                found = contents(materialise(lease.caches))
                assert all(same(a, b) for a, b in zip(found, contents(expected), strict=True))
        cache.clear("adapter-a")
        assert cache.plan([*key, 9], "adapter-a").reason == "namespace"


def test_a_hash_collision_never_serves_wrong_kv() -> None:
    cache = PromptCache(200 * TOKEN_BYTES)
    with constant_hashes():
        for start in range(1000, 1012):
            put(cache, sequence(start, 70))
            assert taken(cache, [*sequence(start, 70), 7]) == 70
            assert taken(cache, sequence(start + 100, 70)) == 0
            cache.check_integrity()
    assert cache.statistics().total.evictions


def test_index_and_storage_agree_after_churn() -> None:
    cache = PromptCache(50 * TOKEN_BYTES)
    for number in range(60):
        put(cache, sequence(1000 + number % 7, 10 + number % 11))
        cache.check_integrity()
        resident = sum(len(node) for node in cache.tree().nodes())
        assert cache.total_bytes - cache.statistics().total.slack_bytes == resident * TOKEN_BYTES
    assert cache.statistics().total.evictions > 10


def test_a_miss_names_the_first_diverging_token(cache: PromptCache) -> None:
    put(cache, [5, 1711, 9, 9, 9])
    plan = cache.plan([5, 1712, 9, 9, 9])
    assert plan.reason == "diverged"
    assert plan.divergence is not None
    assert plan.divergence == type(plan.divergence)(index=1, stored=1711, wanted=1712)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_is_stored_does_not_depend_on_how_it_was_computed(family: str) -> None:
    one, other = PromptCache(1 << 30), PromptCache(1 << 30)
    put(one, range(40), family)
    for stop in (10, 25, 40):
        turn(other, range(stop), family)
    for length in (11, 26, 41):
        if taken(one, range(length), family):
            assert taken(other, range(length), family) == length - 1


def test_a_cache_that_is_off_stores_nothing() -> None:
    cache = PromptCache(0)
    assert put(cache, range(10)).refusal == "off"
    assert taken(cache, range(10)) == 0
    assert cache.total_bytes == 0
    assert cache.statistics().total.nodes == 0


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_byte_cap_holds_after_every_put(family: str) -> None:
    cache = PromptCache(8_000)
    for number in range(60):
        put(cache, [number % 5, *range(number % 30)], family)
        assert cache.total_bytes <= 8_000
    cache.check_integrity()


def test_memory_grows_by_what_is_reported_when_a_batch_ends(cache: PromptCache) -> None:
    batch = ArraysCache(1)
    batch[0] = mx.random.normal((32, 64, 1024))
    mx.eval(batch.cache)
    row = batch.extract(3)
    before = mx.get_active_memory()
    cache.put(range(50), [row])
    assert mx.get_active_memory() - before == pytest.approx(cache.total_bytes, rel=0.02)
    whole = batch[0].nbytes
    del batch, row
    assert before - mx.get_active_memory() == pytest.approx(whole - cache.total_bytes, rel=0.02)


def test_clearing_and_demotion_return_memory_to_the_system() -> None:
    store = FakeColdStore()
    cache = PromptCache(1 << 30, cold=store)
    cache.put(range(256), large(256))
    cache.demote_idle(0)
    assert cache.demotions == 1
    assert mx.get_cache_memory() == 0
    cache.put(range(256), large(256))
    cache.clear()
    assert mx.get_cache_memory() == 0


def test_what_the_ledger_cannot_grant_fails_alone() -> None:
    ledger = Ledger(30 * TOKEN_BYTES)
    cache = PromptCache(1 << 20, ledger=ledger)
    put(cache, sequence(1, 20))
    lease = take(cache, sequence(1, 20))
    assert put(cache, sequence(2, 25)).refusal == "no_room"
    assert lease is not None
    lease.release()
    assert put(cache, sequence(2, 25)).stored
    assert ledger.used(Purpose.EXTENTS) == cache.total_bytes == 25 * TOKEN_BYTES


def test_pending_writes_are_bounded_and_nothing_unsaved_is_dropped() -> None:
    store = FakeColdStore(is_slow=True)
    cache = PromptCache(40 * TOKEN_BYTES, cold=store)
    stored = [start for start in range(1000, 1020) if put(cache, sequence(start, 8)).stored]
    assert sum(write.bytes for write in store.queue) <= 10 * TOKEN_BYTES
    assert len(stored) < 20
    for start in stored:
        assert taken(cache, [*sequence(start, 8), 7]) == 8
    store.finish()
    assert put(cache, sequence(3000, 8)).stored
    for start in stored:
        assert cache.plan([*sequence(start, 8), 7]).usable_tokens == 8


def test_entries_and_running_rows_share_one_ledger() -> None:
    ledger = Ledger(100 * TOKEN_BYTES)
    cache = PromptCache(1 << 20, ledger=ledger)
    put(cache, sequence(1, 60))
    ledger.charge(Purpose.TAILS, 30 * TOKEN_BYTES)
    put(cache, sequence(2, 60))
    assert cache.total_bytes == 60 * TOKEN_BYTES
    assert ledger.total <= ledger.limit
    cache.clear()
    assert ledger.used(Purpose.EXTENTS) == 0


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.CRITICAL):
        yield
