"""Slabs against rows of plain numpy; what they cost, and how many shapes there are."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_swarm.broker.cache.layout import Layout, Plane, TokenLeaf
from mlx_swarm.broker.engine.slabs import ROOM_SHARE, SIZE_STEPS, Tail, TailSlabs, rounded

HEADS, DIM = 2, 4
LAYOUT = Layout((TokenLeaf("KVCache", (Plane("float32", HEADS, DIM),) * 2),) * 2)


def contents(seed: int, tokens: int) -> mx.array:
    """Keys or values `[1, heads, tokens, dim]` that no other seed has."""
    return mx.random.normal((1, HEADS, tokens, DIM), key=mx.random.key(seed))


class World:
    """Slabs and what they must hold."""

    def __init__(self) -> None:
        self.slabs = TailSlabs(LAYOUT)
        self.rows: dict[Tail, list[list[mx.array]]] = {}
        self.seed = 0

    def fresh(self, tokens: int) -> mx.array:
        self.seed += 1
        return contents(self.seed, tokens)

    def join(self, counts: list[int]) -> None:
        added = [(Tail(count + 40), count) for count in counts]
        self.slabs.make_room(added)
        for tail, count in added:
            self.rows[tail] = [[self.fresh(count) for _ in range(2)] for _ in range(2)]
            self.fill(tail, count)

    def fill(self, tail: Tail, count: int) -> None:
        for leaf in range(2):
            if count:
                planes = [plane[:, :, :count] for plane in self.rows[tail][leaf]]
                self.slabs.fill(tail, leaf, 0, planes)

    def prepend(self, tail: Tail, count: int) -> None:
        self.slabs.make_room([(tail, count)])
        for planes in self.rows[tail]:
            planes[:] = [mx.concatenate([self.fresh(count), plane], axis=2) for plane in planes]
        self.fill(tail, count)

    def give_up(self, tail: Tail, count: int) -> None:
        self.slabs.give_up(tail, count)
        for planes in self.rows[tail]:
            planes[:] = [plane[:, :, count:] for plane in planes]
        self.slabs.make_room(())

    def step(self) -> None:
        self.slabs.make_room(())
        tails = list(self.rows)
        tokens = mx.array([tail.begin + tail.used for tail in tails])
        place = mx.broadcast_to(tokens[None, None, :, None], (1, HEADS, len(tails), DIM))
        for leaf in range(2):
            new = [[self.fresh(1) for _ in range(2)] for _ in tails]
            self.slabs.write(
                leaf, place, [mx.concatenate([pair[i] for pair in new]) for i in range(2)]
            )
            for tail, pair in zip(tails, new, strict=True):
                planes = self.rows[tail][leaf]
                planes[:] = [
                    mx.concatenate([old, one], axis=2)
                    for old, one in zip(planes, pair, strict=True)
                ]
        for tail in tails:
            tail.used += 1

    def leave(self, tail: Tail) -> None:
        self.slabs.free(tail)
        del self.rows[tail]

    def check(self) -> None:
        self.slabs.check_integrity()
        for tail, leaves in self.rows.items():
            for leaf, planes in enumerate(leaves):
                assert all(tail.begin < len(view) for view in self.slabs.view(leaf))
                segment = self.slabs.segment(leaf, tail, 100)
                assert (segment.start, segment.stop) == (100, 100 + tail.used)
                for plane, held, view in zip(
                    planes, segment.planes, self.slabs.view(leaf), strict=True
                ):
                    assert mx.array_equal(held, plane)
                    assert mx.array_equal(view[tail.begin, :, : tail.used][None], plane)


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_tails_keep_their_tokens_whoever_comes_grows_and_goes(data: st.DataObject) -> None:
    world = World()
    for _ in range(data.draw(st.integers(1, 12))):
        match data.draw(st.sampled_from(["join", "step", "step", "leave", "prepend", "give up"])):
            case "join":
                world.join(data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=4)))
            case "step" if world.rows:
                for _ in range(data.draw(st.integers(1, 12))):
                    world.step()
            case "leave" if world.rows:
                world.leave(data.draw(st.sampled_from(list(world.rows))))
            case "give up" if world.rows:
                tail = data.draw(st.sampled_from(list(world.rows)))
                world.give_up(tail, data.draw(st.integers(0, tail.used)))
            case "prepend" if world.rows:
                tail = data.draw(st.sampled_from(list(world.rows)))
                world.prepend(tail, data.draw(st.integers(1, 20)))
        world.check()
    for tail in list(world.rows):
        world.leave(tail)
    assert world.slabs.nbytes == 0
    assert world.slabs.arrays == []


def test_ragged_tails_cost_at_most_a_quarter_more_than_their_tokens_on_the_long_run() -> None:
    """Counted as the mean over all steps of the slabs' bytes over those that tokens fill."""
    rng = np.random.default_rng(1)
    slabs = TailSlabs(LAYOUT)
    ends: dict[Tail, int] = {}
    allocated = filled = 0
    shapes = set()
    for _ in range(1500):
        while len(ends) < 32 and rng.random() < 0.5:
            own, generated = (int(n) for n in rng.integers((10, 40), (400, 200)))
            tail = Tail(own + generated)
            slabs.make_room([(tail, own)])
            ends[tail] = own + generated
        slabs.make_room(())
        for tail in list(ends):
            tail.used += 1
            if tail.used == ends[tail]:
                slabs.free(tail)
                del ends[tail]
        statistics = slabs.statistics()
        allocated += statistics.bytes
        filled += statistics.used_bytes
        shapes.add(slabs.tokens)
    assert allocated <= 1.25 * filled
    assert len(shapes) <= 5 * 16


def test_a_join_that_fits_moves_nobody() -> None:
    slabs = TailSlabs(LAYOUT)
    first = [Tail(200) for _ in range(8)]
    slabs.make_room([(tail, 100) for tail in first])
    slabs.free(first[3])
    before = [(tail.begin, tail.capacity) for tail in first if tail is not first[3]]
    moves = slabs.statistics().moves
    assert not slabs.make_room([(Tail(150), 90)])
    assert before == [(tail.begin, tail.capacity) for tail in first if tail is not first[3]]
    assert slabs.statistics().moves == moves
    slabs.check_integrity()


def test_sizes_come_in_few_steps() -> None:
    sizes = {rounded(tokens) for tokens in range(1, 1 << 16)}
    assert len(sizes) <= SIZE_STEPS * 14
    assert all(n <= rounded(n) <= max(SIZE_STEPS, n + n // 16) for n in range(1, 1 << 16))


def test_every_tail_stays_in_view_when_one_begins_later_than_before() -> None:
    """The views of all slots are as long as the longest region."""
    world = World()
    world.join([30, 30])
    world.give_up(max(world.rows, key=lambda tail: tail.begin), 28)
    world.check()


def test_tails_stay_where_they_are_if_new_slabs_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    world.join([30, 20])
    tail = Tail(200)
    with monkeypatch.context() as patch:
        patch.setattr(mx, "take", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            world.slabs.make_room([(tail, 120)])
    assert not tail.capacity
    world.check()
    world.step()
    world.check()


def test_slabs_become_smaller_once_most_rows_have_left() -> None:
    world = World()
    world.join([100] * 16)
    for tail in list(world.rows)[1:]:
        world.leave(tail)
    world.step()
    world.check()
    assert world.slabs.tokens <= rounded(101 + 100 // ROOM_SHARE)


def test_tokens_of_any_size_are_moved_whole() -> None:
    for dtype, dim in (("bfloat16", 3), ("float16", 4), ("float32", 1), ("bfloat16", 64)):
        layout = Layout((TokenLeaf("KVCache", (Plane(dtype, HEADS, dim),) * 2),))
        slabs, tail = TailSlabs(layout), Tail(100)
        slabs.make_room([(tail, 5)])
        keys, values = (
            mx.random.normal((1, HEADS, 5, dim)).astype(getattr(mx, dtype)) for _ in "kv"
        )
        slabs.fill(tail, 0, 0, (keys, values))
        moves = slabs.statistics().moves
        slabs.make_room([(Tail(100), 40)])
        assert slabs.statistics().moves == moves + 1
        held = slabs.segment(0, tail, 0).planes
        for plane, before in zip(held, (keys, values), strict=True):
            assert mx.array_equal(plane, before)
