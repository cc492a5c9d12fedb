"""The prefix tree against a scan over every stored prefix, and what single operations promise."""

import contextlib
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlx_swarm.broker.cache.eviction import LRU, EvictionQueue, HitDensity
from mlx_swarm.broker.cache.node import Node, NodeState
from mlx_swarm.broker.cache.prefix_hash import as_tokens, entry_name, namespace_digest
from mlx_swarm.broker.cache.tree import MonotoneClock, PrefixTree, Walk
from mlx_swarm.broker.errors import CacheError
from mlx_swarm.broker.trace.events import Divergence
from tests.cache.index_model import FakeSpan, ManualClock, PrefixOracle, span_of

sequences = st.lists(st.integers(0, 2), min_size=1, max_size=12)
RESIDENT, PENDING, COLD = NodeState.RESIDENT, NodeState.PENDING, NodeState.COLD


def stored(*entries: list[int]) -> PrefixTree:
    """A tree of resident entries."""
    tree = PrefixTree()
    for tokens in entries:
        tree.insert(tokens, span_of(tokens, tree.walk(tokens).length))
    return tree


def boundary(tree: PrefixTree, walk: Walk, length: int) -> Node:
    """The node that ends exactly at `length` on the walked path, split there if need be."""
    node = walk.node_at(length)
    return node if node.stop == length else tree.split(node, length)


class TreeMachine(RuleBasedStateMachine):
    """Random life of a tree and its queue; after every step both agree with the oracle."""

    @initialize(policy=st.sampled_from([LRU, HitDensity]))
    def start(self, policy: type[LRU | HitDensity]) -> None:
        self.clock = ManualClock()
        clock = MonotoneClock(self.clock)
        self.queue = EvictionQueue(policy(), clock)
        self.tree = PrefixTree("space", clock=clock, observer=self.queue)
        self.oracle = PrefixOracle()
        self.leased: list[tuple[Node, tuple[int, ...]]] = []
        self.pins: dict[tuple[int, ...], float] = {}
        self.latest = 0.0

    @rule(tokens=sequences, priority=st.integers(0, 2))
    def put(self, tokens: list[int], priority: int) -> None:
        walk = self.tree.walk(tokens)
        new = tokens[walk.length :]
        span = span_of(tokens, walk.length) if new else None
        if new and self.oracle.held(tokens) < walk.length:
            with pytest.raises(CacheError, match="resident below"):
                self.tree.insert(tokens, span)
            return
        insertion = self.tree.insert(tokens, span, priority=priority)
        assert insertion.node.stop == len(tokens)
        assert insertion.node.is_entry
        assert (insertion.created is insertion.node) == bool(new)
        self.oracle.put(tokens, RESIDENT)

    @rule(tokens=sequences, state=st.sampled_from([PENDING, COLD]))
    def announce(self, tokens: list[int], state: NodeState) -> None:
        with contextlib.suppress(CacheError):
            self.tree.insert(tokens, state=state)
            self.oracle.put(tokens, state)

    @rule(tokens=sequences)
    def fill(self, tokens: list[int]) -> None:
        """What is pending or cold on a path becomes resident from the top."""
        for node in self.tree.walk(tokens).path:
            whole = self.tree.tokens_of(node).tolist()
            if node.state is not RESIDENT:
                self.tree.attach(node, span_of(whole, node.start))
                self.oracle.mark(node, whole, RESIDENT)

    @rule(tokens=sequences, cut=st.integers(1, 12))
    def split(self, tokens: list[int], cut: int) -> None:
        walk = self.tree.walk(tokens)
        if cut <= walk.length:
            node = boundary(self.tree, walk, cut)
            assert node.stop == cut
            assert self.tree.tokens_of(node).tolist() == tokens[:cut]

    @rule(tokens=sequences)
    def demote(self, tokens: list[int]) -> None:
        for node in reversed(self.tree.walk(tokens).path):
            whole = self.tree.tokens_of(node).tolist()
            if node.state is RESIDENT and not node.held_children and not node.leases:
                span = self.tree.detach(node)
                assert span == span_of(whole, node.start)
                self.oracle.mark(node, whole, COLD)
            elif node.held_children or node.leases:
                with pytest.raises(CacheError, match="children in RAM"):
                    self.tree.detach(node)
                return

    @rule(tokens=sequences)
    def lease(self, tokens: list[int]) -> None:
        walk = self.tree.walk(tokens)
        if walk.held_length:
            node = boundary(self.tree, walk, walk.held_length)
            self.tree.lease(node)
            self.tree.touch(node)
            self.leased.append((node, tuple(tokens[: walk.held_length])))

    @precondition(lambda self: self.leased)
    @rule(which=st.integers(0, 100))
    def release(self, which: int) -> None:
        node, tokens = self.leased.pop(which % len(self.leased))
        assert tuple(self.tree.tokens_of(node).tolist()) == tokens
        self.tree.release(node)

    @rule(tokens=sequences, ttl=st.integers(1, 20))
    def pin(self, tokens: list[int], ttl: int) -> None:
        walk = self.tree.walk(tokens)
        if walk.held_length:
            self.tree.pin(boundary(self.tree, walk, walk.held_length), ttl)
            key = tuple(tokens[: walk.held_length])
            self.pins[key] = max(self.pins.get(key, 0), self.latest + ttl)

    @rule(tokens=sequences, eta=st.sampled_from([0.0, 1.0, 5.0, float("inf")]))
    def expect(self, tokens: list[int], eta: float) -> None:
        path = self.tree.walk(tokens).path
        if path:
            self.tree.expect(path[-1], eta)

    @rule(seconds=st.integers(-10, 10))
    def wait(self, seconds: int) -> None:
        """The clock may go back; what the tree takes for now does not."""
        self.clock.now += seconds
        self.latest = max(self.latest, self.clock.now)
        self.pins = {key: until for key, until in self.pins.items() if until > self.latest}

    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        with contextlib.closing(self.queue.victims()) as victims:
            for at, node in enumerate(victims):
                if at == count:
                    break
                whole = self.tree.tokens_of(node).tolist()
                if node.children:
                    self.tree.detach(node)
                    self.oracle.mark(node, whole, COLD)
                else:
                    self.tree.remove(node)
                    self.oracle.drop(node, whole)

    @rule()
    def evict_everything(self) -> None:
        """Only what is leased, pinned, or carries something unfinished stays."""
        self.evict(1000)
        for node in self.tree.nodes():
            if node.is_held_leaf:
                assert self.tree.is_pinned(node)

    @invariant()
    def protected_prefixes_stay(self) -> None:
        for key in (*self.pins, *(tokens for _, tokens in self.leased)):
            assert self.oracle.states.get(key) in (RESIDENT, COLD)
        for _, tokens in self.leased:
            assert self.oracle.states[tokens] is RESIDENT

    @invariant()
    def agrees(self) -> None:
        self.tree.check_integrity()
        self.queue.check_integrity()
        assert self.tree.statistics().tokens == len(self.oracle.states)
        for node in self.tree.nodes():
            if isinstance(node.span, FakeSpan):
                assert node.span == (node.start, tuple(node.tokens.tolist()))

    @rule(tokens=sequences)
    def look_up(self, tokens: list[int]) -> None:
        walk = self.tree.walk(tokens)
        assert walk.length == self.oracle.matched(tokens)
        assert walk.held_length == self.oracle.held(tokens)
        others = self.oracle.continuations(tokens[: walk.length])
        if walk.length < len(tokens) and others:
            assert walk.divergence is not None
            assert walk.divergence.index == walk.length
            assert walk.divergence.stored in others
            assert walk.divergence.wanted == tokens[walk.length]
        else:
            assert walk.divergence is None
        found = self.tree.find(tokens)
        assert found is None or self.tree.tokens_of(found).tolist() == tokens


TreeMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestTreeMachine = TreeMachine.TestCase


def test_a_short_entry_never_shadows_a_longer_common_prefix() -> None:
    tree = stored([1, 2], [1, 2, 3, 4, 5, 6])
    assert tree.walk([1, 2, 3, 4, 9]).length == 4


def test_a_match_may_end_inside_an_edge_and_says_where_it_parts() -> None:
    tree = stored([1, 2, 3, 4])
    walk = tree.walk([1, 2, 9, 4])
    assert (walk.length, len(walk.path)) == (2, 1)
    assert walk.divergence == Divergence(2, 3, 9)
    assert tree.walk([1, 2]).divergence is None
    assert tree.walk([1, 2, 3, 4, 5]).divergence is None


def test_splitting_keeps_what_belongs_to_the_end() -> None:
    tree = stored([1, 2, 3, 4])
    node = tree.find([1, 2, 3, 4])
    assert node is not None
    node.checkpoint = "state"
    tree.lease(node)
    tree.touch(node)
    name = tree.name(node)
    upper = tree.split(node, 3)
    assert (upper.stop, upper.checkpoint, upper.leases, upper.is_entry) == (3, None, 0, False)
    assert (upper.hits, upper.last_used) == (node.hits, node.last_used)
    assert (node.stop, node.checkpoint, node.leases, node.is_entry) == (4, "state", 1, True)
    assert tree.name(node) == name
    assert node.parent is upper


def test_the_donor_of_a_match_is_an_entry_below_it() -> None:
    tree = stored([1, 2, 3], [1, 2, 4, 5])
    shared = tree.find([1, 2])
    assert shared is not None
    assert not shared.is_entry
    assert tree.entry_below(shared) is tree.find([1, 2, 4, 5])
    whole = tree.find([1, 2, 3])
    assert whole is not None
    assert tree.entry_below(whole) is whole


def test_a_refused_insert_changes_nothing() -> None:
    tree = stored([1, 2, 3])
    tree.insert([1, 2, 3, 4, 5], state=PENDING)
    before = tree.statistics()
    refused: list[tuple[list[int], Any, str]] = [
        ([], None, "at least one token"),
        ([1, 9], FakeSpan(0, (1, 9)), "span of 2 tokens for 1 new"),
        ([1, 2, 3, 4, 9], FakeSpan(4, (9,)), "resident below pending at token 4"),
        ([1, 2, 3], FakeSpan(2, (3,)), "span of 1 tokens for 0 new"),
    ]
    for tokens, span, message in refused:
        with pytest.raises(CacheError, match=message):
            tree.insert(tokens, span)
    assert tree.statistics() == before


def test_illegal_steps_quote_both_states() -> None:
    tree = stored([1, 2, 3])
    node = tree.find([1, 2, 3])
    assert node is not None
    with pytest.raises(CacheError, match="resident> can become cold; got pending"):
        tree.set_state(node, PENDING)
    below = tree.insert([1, 2, 3, 4], state=PENDING).node
    with pytest.raises(CacheError, match="1 children in RAM"):
        tree.detach(node)
    with pytest.raises(CacheError, match="needs a span"):
        tree.set_state(below, RESIDENT)
    tree.remove(below)
    tree.detach(node)
    cold = tree.insert([1, 2, 3, 4], state=COLD).node
    with pytest.raises(CacheError, match="cannot be resident below cold"):
        tree.attach(cold, FakeSpan(3, (4,)))
    tree.check_integrity()


def test_a_leased_or_inner_node_is_not_removed() -> None:
    tree = stored([1, 2], [1, 2, 3])
    inner, leaf = tree.find([1, 2]), tree.find([1, 2, 3])
    assert inner is not None
    assert leaf is not None
    tree.lease(leaf)
    for node in (inner, leaf):
        with pytest.raises(CacheError, match="children and"):
            tree.remove(node)
    tree.release(leaf)
    tree.remove(leaf)
    tree.remove(inner)
    assert len(tree) == 0


def test_an_expired_pin_stays_expired_when_the_clock_goes_back() -> None:
    clock = ManualClock()
    tree = PrefixTree(clock=clock)
    node = tree.insert([1, 2], span_of([1, 2], 0)).node
    tree.pin(node, 10)
    tree.pin(node, 5)
    clock.now = 9.9
    assert tree.pinned_nodes() == {node}
    clock.now = 10.0
    assert not tree.is_pinned(node)
    clock.now = 0.0
    assert not tree.is_pinned(node)
    assert tree.pinned_nodes() == set()


@pytest.mark.parametrize("ttl", [0.0, -1.0, float("nan")])
def test_a_pin_lasts_some_time(ttl: float) -> None:
    tree = stored([1, 2])
    node = tree.find([1, 2])
    assert node is not None
    with pytest.raises(CacheError, match="more than 0"):
        tree.pin(node, ttl)
    assert not tree.pinned_nodes()


def test_a_pin_covers_the_path_above_it() -> None:
    tree = stored([1, 2], [1, 2, 3], [1, 2, 4])
    leaf = tree.find([1, 2, 3])
    assert leaf is not None
    tree.pin(leaf, 10)
    assert tree.pinned_nodes() == {leaf, leaf.parent}
    assert tree.statistics().pinned_nodes == 2
    tree.unpin(leaf)
    assert tree.pinned_nodes() == set()


def test_a_hit_refreshes_the_whole_path() -> None:
    clock = ManualClock()
    tree = PrefixTree(clock=clock)
    for tokens in ([1, 2], [1, 2, 3], [1, 2, 4]):
        tree.insert(tokens, span_of(tokens, tree.walk(tokens).length))
    clock.now = 5.0
    hit = tree.find([1, 2, 3])
    assert hit is not None
    tree.touch(hit)
    assert [(node.last_used, node.hits) for node in hit.path()] == [(5.0, 1), (5.0, 1)]
    other = tree.find([1, 2, 4])
    assert other is not None
    assert (other.last_used, other.hits) == (0.0, 0)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 150), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_names_are_those_of_the_whole_sequence(lengths: list[int], chance: Any) -> None:
    """However the path is cut into nodes, and in whatever order names are asked for."""
    tree = PrefixTree("space")
    tokens = [chance.randrange(50_000) for _ in range(sum(lengths))]
    stops = [sum(lengths[: at + 1]) for at in range(len(lengths))]
    for stop in chance.sample(stops, len(stops)):
        tree.insert(tokens[:stop], state=PENDING)
        if chance.random() < 0.5:
            tree.name(next(iter(tree.nodes())))
    for node in tree.nodes():
        expected = entry_name(as_tokens(tokens[: node.stop]), namespace_digest("space"))
        assert tree.name(node) == expected


def test_paths_of_a_hundred_thousand_nodes_need_no_recursion() -> None:
    tokens = np.arange(131_072, dtype=np.uint32)
    tree = PrefixTree()
    node = tree.insert(tokens, span_of([0] * len(tokens), 0)).node
    for at in range(len(tokens) - 1, len(tokens) - 2000, -1):
        tree.split(node.path()[0] if at == len(tokens) - 1 else tree.root.children[0], at)
    assert tree.walk(tokens).length == len(tokens)
    assert len(tree.walk(tokens).path) == 2000
    tree.lease(node)
    tree.touch(node)
    tree.release(node)
    assert tree.name(node).length == len(tokens)
    assert tree.entry_below(tree.root) is node
    for each in tree.leaves_first():
        tree.remove(each)
    assert len(tree) == 0


def test_reported_index_bytes_are_true() -> None:
    """Within a tenth of what the allocator says, after splits and removals, too."""
    generator = np.random.default_rng(1)
    shared = generator.integers(0, 2**32, 1000, np.uint32)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tree = PrefixTree()
        for _ in range(200):
            tail = generator.integers(0, 2**32, 2000, np.uint32)
            tree.insert(np.concatenate([shared, tail]), state=PENDING)
        for node in [each for each in tree.leaves_first() if not each.children][::2]:
            tree.split(node, node.start + 10)
            tree.remove(node)
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    statistics = tree.statistics()
    assert 0.9 < statistics.index_bytes / held < 1.1
    assert statistics.index_bytes < 4.7 * statistics.tokens


@pytest.mark.parametrize("digest", [None, b"model and tokenizer"])
def test_namespaces_do_not_share_names(digest: bytes | None) -> None:
    one, other = PrefixTree("one", digest=digest), PrefixTree("other")
    names = {tree.name(tree.insert([1, 2], state=PENDING).node) for tree in (one, other)}
    assert len(names) == 2
