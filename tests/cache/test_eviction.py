"""The queue against a scan for the next victim; hints; and what the default policy learns."""

import contextlib
import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.block_replay import Replay, Request, clairvoyant_hit_rate, working_set
from bench.cache_workloads import bursts, documents, phases, round_table, swarm
from mlx_swarm.broker.cache.density import hit_densities
from mlx_swarm.broker.cache.eviction import LRU, EvictionPolicy, EvictionQueue, HitDensity
from mlx_swarm.broker.cache.node import Node, NodeState
from mlx_swarm.broker.cache.tree import MAX_HINTS, PrefixTree
from mlx_swarm.broker.errors import CacheError
from tests.cache.index_model import ManualClock, span_of


class Cache:
    """A tree with its queue, and ways to say in one line what happens to it."""

    def __init__(self, policy: EvictionPolicy | None = None, step: float = 1.0) -> None:
        self.clock = ManualClock(step)
        self.queue = EvictionQueue(policy or LRU(), self.clock)
        self.tree = PrefixTree(clock=self.clock, observer=self.queue)

    def put(self, *tokens: int, priority: int = 0) -> Node:
        start = self.tree.walk(tokens).length
        span = span_of(tokens, start) if start < len(tokens) else None
        return self.tree.insert(tokens, span, priority=priority).node

    def evict(self, count: int) -> list[list[int]]:
        """Remove the next victims; their sequences."""
        gone = []
        with contextlib.closing(self.queue.victims()) as victims:
            for node in itertools.islice(victims, count):
                gone.append(self.tree.tokens_of(node).tolist())
                self.tree.remove(node)
        self.queue.check_integrity()
        return gone


def scan_for_victim(tree: PrefixTree) -> Node | None:
    """The least recently used leaf of the lowest priority, by looking at all nodes."""
    leaves = [
        node
        for node in tree.nodes()
        if node.state is NodeState.RESIDENT and not node.children and not node.leases
    ]
    return min(leaves, key=lambda node: (node.priority, node.last_used), default=None)


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_victims_come_in_the_order_that_a_scan_finds(chance: random.Random) -> None:
    cache = Cache()
    nodes: list[Node] = []
    for _ in range(40):
        length = chance.randint(1, 6)
        tokens = [chance.randrange(3) for _ in range(length)]
        nodes.append(cache.put(*tokens, priority=chance.choice([0, 0, 1])))
        if chance.random() < 0.5:
            cache.tree.touch(chance.choice(nodes))
        if chance.random() < 0.2:
            cache.tree.lease(chance.choice(nodes))
    with contextlib.closing(cache.queue.victims()) as victims:
        for node in victims:
            assert node is scan_for_victim(cache.tree)
            cache.tree.remove(node)
    assert scan_for_victim(cache.tree) is None


def test_a_hot_donor_outlives_cold_newer_entries() -> None:
    cache = Cache()
    donor = cache.put(1, 2, 3)
    cache.put(5, 6)
    cache.put(7, 8)
    cache.tree.touch(donor)
    assert cache.evict(2) == [[5, 6], [7, 8]]


def test_parents_follow_their_last_child() -> None:
    cache = Cache()
    for tokens in ((1, 2), (1, 2, 3), (1, 2, 4)):
        cache.put(*tokens)
    assert cache.evict(9) == [[1, 2, 3], [1, 2, 4], [1, 2]]


def test_what_is_passed_over_is_queued_again() -> None:
    cache = Cache()
    for token in range(4):
        cache.put(token)
    with contextlib.closing(cache.queue.victims()) as victims:
        seen = [node.tokens[0] for node in victims]
    assert seen == [0, 1, 2, 3]
    assert cache.queue.statistics().evictable == 4
    assert cache.queue.statistics().evictions == 0
    assert cache.evict(1) == [[0]]


def test_pinned_leaves_come_back_when_the_pin_expires() -> None:
    cache = Cache(step=0.0)
    node = cache.put(1)
    cache.put(2)
    cache.tree.pin(node, 10)
    assert cache.queue.statistics().pinned == 1
    assert cache.evict(9) == [[2]]
    cache.clock.now = 11.0
    assert cache.evict(9) == [[1]]


def test_leased_leaves_come_back_when_released() -> None:
    cache = Cache()
    node = cache.put(1)
    cache.tree.lease(node)
    cache.tree.lease(node)
    cache.tree.release(node)
    assert cache.evict(9) == []
    cache.tree.release(node)
    assert cache.evict(9) == [[1]]


def test_trees_share_one_order() -> None:
    cache = Cache()
    other = PrefixTree("other", clock=cache.clock, observer=cache.queue)
    cache.put(1)
    there = other.insert([1], span_of([1], 0)).node
    cache.put(2)
    order = list(itertools.islice(cache.queue.victims(), 3))
    assert [node.tree.namespace for node in order] == ["", "other", ""]
    assert order[1] is there


def test_of_hinted_leaves_the_one_due_last_leaves_first() -> None:
    cache = Cache(step=0.0)
    for token, eta in ((1, 5.0), (2, 50.0), (3, math.inf), (4, 20.0)):
        cache.tree.expect(cache.put(token), eta)
    assert cache.queue.statistics().hinted == 4
    assert cache.evict(4) == [[3], [2], [4], [1]]


def test_an_idle_leaf_leaves_before_one_that_is_due_sooner() -> None:
    """Without a hint, a leaf is expected to wait as long as it has lain idle."""
    cache = Cache(step=0.0)
    cache.put(1)
    cache.clock.now = 30.0
    cache.tree.expect(cache.put(2), 20.0)
    cache.tree.expect(cache.put(3), 40.0)
    assert cache.evict(3) == [[3], [1], [2]]


def test_a_hint_lapses_once_overdue_by_as_much_as_it_lay_ahead() -> None:
    cache = Cache(step=0.0)
    cache.tree.expect(cache.put(1), 10.0)
    cache.clock.now = 15.0
    cache.put(2)
    assert cache.queue.statistics().hinted == 1
    cache.clock.now = 20.0
    assert cache.evict(1) == [[1]]


def test_each_hit_takes_one_expectation() -> None:
    cache = Cache(step=0.0)
    shared = cache.put(1)
    for eta in (3.0, 5.0):
        cache.tree.expect(shared, eta)
    cache.tree.touch(shared)
    assert shared.hints == [5.0]
    cache.tree.touch(shared)
    assert not shared.hints


def test_hints_move_up_when_what_they_were_given_for_leaves() -> None:
    cache = Cache(step=0.0)
    cache.put(1)
    leaf = cache.put(1, 2)
    cache.tree.expect(leaf, 100.0)
    assert cache.evict(1) == [[1, 2]]
    assert cache.tree.root.children[1].hints == [100.0]


def test_that_one_agent_is_done_says_nothing_about_what_others_share() -> None:
    cache = Cache(step=0.0)
    shared = cache.put(1)
    for _ in range(5):
        cache.tree.touch(shared)
    cache.put(1, 2)
    last = cache.put(1, 2, 3)
    cache.tree.expect(last, math.inf)
    assert cache.evict(2) == [[1, 2, 3], [1, 2]]
    assert not shared.hints


def test_expectations_are_numbers_and_do_not_pile_up() -> None:
    cache = Cache()
    node = cache.put(1, 2)
    with pytest.raises(CacheError, match="nan"):
        cache.tree.expect(node, math.nan)
    for _ in range(MAX_HINTS):
        cache.tree.expect(node, math.inf)
    cache.tree.expect(node, 5.0)
    assert node.hints is not None
    assert len(node.hints) == MAX_HINTS
    assert node.hints[0] < math.inf
    cache.tree.check_integrity()


def test_void_places_do_not_pile_up() -> None:
    cache = Cache()
    nodes = [cache.put(token) for token in range(20)]
    for _ in range(2000):
        cache.tree.touch(random.Random(1).choice(nodes))
    assert sum(map(len, cache.queue._groups.values())) <= 64 + 3 * len(nodes)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 20))
def test_density_is_the_best_over_all_stopping_ages(hits: list[int], extra: int) -> None:
    lifetimes = sum(hits) + extra + 1
    widths = [1 << max(0, age - 1) for age in range(len(hits))]
    left = [lifetimes - sum(hits[:age]) - hits[age] / 2 for age in range(len(hits))]
    for age, density in enumerate(hit_densities(hits, lifetimes)):
        candidates = [
            sum(hits[age:stop]) / sum(left[at] * widths[at] for at in range(age, stop))
            for stop in range(age + 1, len(hits) + 1)
        ]
        assert density == pytest.approx(max(candidates))


def test_with_nothing_learnt_the_default_policy_is_lru() -> None:
    requests = documents(3, count=50, skew=0.5, moves_every=10_000, total=40)
    assert Replay(40, HitDensity()).hit_rate(requests) == Replay(40, LRU()).hit_rate(requests)


def test_frequency_is_remembered_beyond_eviction() -> None:
    policy = HitDensity()
    cache = Cache(policy)
    tokens = tuple(range(64))
    for expected in (1, 2, 3):
        node = cache.put(*tokens)
        assert node.uses == expected
        cache.evict(1)


def test_its_memory_is_bounded() -> None:
    policy = HitDensity(memory=10)
    cache = Cache(policy)
    for token in range(50):
        cache.put(*[token] * 64)
        cache.evict(1)
    assert len(policy._evicted) == 10


@pytest.mark.parametrize(
    ("requests", "share", "least"),
    [
        (documents(4, count=400, skew=1.0, moves_every=900, total=3000), 0.03, 1.1),
        (bursts(5, most=4, gap_seconds=60, count=700), 0.05, 1.0),
        (phases(6, documents=40, uses=15, total=2000), 0.04, 0.98),
    ],
    ids=["frequency counts", "bursts", "frequency misleads"],
)
def test_the_default_policy_against_lru(
    requests: list[Request], share: float, least: float
) -> None:
    capacity = int(working_set(requests) * share)
    base = Replay(capacity, LRU()).hit_rate(requests)
    assert Replay(capacity, HitDensity()).hit_rate(requests) >= least * base


@pytest.mark.parametrize(
    "requests",
    [swarm(7, agents=24, turns=5, tool_seconds=20, waves=3), round_table(8, agents=20, rounds=8)],
    ids=["tool calls", "round table"],
)
@pytest.mark.parametrize("share", [0.1, 0.3])
def test_with_hints_swarms_come_close_to_clairvoyance(
    requests: list[Request], share: float
) -> None:
    capacity = int(working_set(requests) * share)
    best = clairvoyant_hit_rate(requests, capacity)
    assert Replay(capacity, HitDensity(), hinted=True).hit_rate(requests) >= 0.9 * best
