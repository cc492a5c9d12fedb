"""Levels of memory pressure and their measures, on a machine that is made up."""

import pytest

from mlx_swarm.broker.engine import pressure
from mlx_swarm.broker.engine.pressure import Level, Measures, MemoryWatch, Reading, next_level

LIMIT, WEIGHTS = 1_200, 200
"""A share of 0.9 is 900 of 1,000 bytes, beside the weights."""


class Machine:
    """MLX's memory of rows, cache and pool; other memory; what was freed and the allocator keeps;
    and what was given back, of which the system will take note late. What is done is noted.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.rows = 0
        self.other = 0
        self.late = 0
        self.kept = 0
        self.pool = 0
        self.cache = 0
        self.is_writing = False
        self.reads = 0
        self.done: list[str] = []
        self.levels: list[str] = []
        self.watch = MemoryWatch(
            self.read,
            Measures(self.empty_pool, self.shrink, self.preempt),
            lambda: WEIGHTS,
            self.changed,
            lambda: self.now,
        )

    def read(self) -> Reading:
        self.reads += 1
        active = WEIGHTS + self.cache + self.rows
        beside = self.other + self.kept + self.late
        return Reading(active, self.pool, active + self.pool + beside, LIMIT)

    def empty_pool(self) -> None:
        self.pool = self.kept = 0
        self.done.append("empty")

    def shrink(self, nbytes: int) -> bool:
        gone = min(nbytes, self.cache)
        self.cache -= gone
        self.done.append(f"shrink {nbytes}")
        return gone > 0 or self.is_writing

    def preempt(self, nbytes: int) -> None:
        self.done.append(f"preempt {nbytes}")

    def changed(self, before: Level, reading: Reading) -> None:
        self.levels.append(f"{before.value} -> {self.watch.level.value} at {reading.footprint}")

    def check(self) -> list[str]:
        """What the next check does."""
        self.now += pressure.INTERVAL
        before = len(self.done)
        self.watch.check()
        return self.done[before:]


@pytest.mark.parametrize(
    ("before", "share", "after"),
    [
        (Level.NORMAL, 0.899, Level.NORMAL),
        (Level.NORMAL, 0.90, Level.SOFT),
        (Level.NORMAL, 0.96, Level.HARD),
        (Level.SOFT, 0.851, Level.SOFT),
        (Level.SOFT, 0.849, Level.NORMAL),
        (Level.SOFT, 0.959, Level.SOFT),
        (Level.SOFT, 0.97, Level.HARD),
        (Level.HARD, 0.911, Level.HARD),
        (Level.HARD, 0.909, Level.SOFT),
        (Level.HARD, 0.849, Level.NORMAL),
        (Level.HARD, 3.0, Level.HARD),
    ],
)
def test_a_level_begins_at_its_watermark_and_ends_well_below(
    before: Level, share: float, after: Level
) -> None:
    assert next_level(before, share) is after


def test_without_pressure_nothing_is_done() -> None:
    machine = Machine()
    machine.cache, machine.pool = 700, 199
    assert machine.check() == []
    assert not machine.watch.pauses


def test_the_pool_goes_first_and_may_be_enough() -> None:
    machine = Machine()
    machine.cache, machine.pool = 850, 50
    assert machine.check() == ["empty"]
    assert machine.watch.level is Level.NORMAL


def test_what_the_allocator_keeps_is_given_back_before_anybody_waits_for_it() -> None:
    machine = Machine()
    machine.rows, machine.kept = 800, 170
    assert machine.check() == ["empty"]
    assert machine.levels == []


def test_what_the_allocator_keeps_does_not_keep_a_level_up() -> None:
    machine = Machine()
    machine.rows = 910
    machine.check()
    machine.rows = 870
    for _ in range(24):
        machine.kept = 20
        machine.check()
    assert machine.watch.pauses
    machine.rows = 840
    for _ in range(9):
        machine.check()
    assert not machine.watch.pauses


def test_the_pool_is_emptied_now_and_then_and_makes_no_level() -> None:
    machine = Machine()
    done = []
    for _ in range(16):
        machine.cache, machine.pool = 880, 110
        done += machine.check()
    assert done == ["empty"] * 2
    assert machine.levels == []


def test_then_admission_pauses_and_the_cache_shrinks_step_by_step() -> None:
    machine = Machine()
    machine.cache, machine.rows, machine.pool = 500, 420, 30
    assert machine.check() == ["empty", "shrink 31", "empty"]
    assert machine.watch.pauses
    assert machine.levels == ["normal -> soft at 1120"]
    assert machine.check() == ["shrink 31", "empty"]
    assert machine.check() == ["shrink 8", "empty"]
    machine.rows -= 1
    assert machine.check() == []
    assert not machine.watch.pauses
    assert machine.levels[1:] == ["soft -> normal at 1049"]


def test_a_cache_that_has_no_more_to_give_is_asked_again_and_nobody_else() -> None:
    machine = Machine()
    machine.rows = 940
    assert machine.check() == ["empty", "shrink 31"]
    assert [machine.check() for _ in range(3)] == [["shrink 31"]] * 3
    machine.rows = 849
    assert machine.check() == []
    assert not machine.watch.pauses


def test_above_the_hard_mark_all_of_it_goes_at_once_and_rows_only_after_it() -> None:
    machine = Machine()
    machine.cache, machine.rows = 90, 900
    assert machine.check() == ["empty", "shrink 140", "empty"]
    machine.rows = 990
    assert machine.check() == ["shrink 140", "preempt 140"]
    machine.is_writing = True
    assert machine.check() == ["shrink 140", "empty"]


def test_around_a_watermark_the_level_does_not_flap() -> None:
    machine = Machine()
    for step in range(40):
        machine.rows = 890 + 20 * (step % 2)
        machine.check()
    assert machine.levels == ["normal -> soft at 1110"]


def test_between_two_checks_nothing_is_read() -> None:
    machine = Machine()
    machine.check()
    for _ in range(100):
        machine.now += pressure.INTERVAL / 101
        machine.watch.check()
    assert machine.reads == 1


def test_slow_measures_do_not_become_all_that_is_done() -> None:
    machine = Machine()
    machine.rows, shrink = 950, machine.shrink

    def slow(nbytes: int) -> bool:
        machine.now += 10
        return shrink(nbytes)

    machine.watch._measures = machine.watch._measures._replace(shrink=slow)
    machine.check()
    machine.watch.check()
    assert machine.done == ["empty", "shrink 31"]


def test_a_reading_that_fails_is_not_repeated_at_every_turn() -> None:
    machine = Machine()

    def failing() -> Reading:
        machine.reads += 1
        raise OSError("no such file")

    machine.watch._read = failing
    with pytest.raises(OSError, match="no such file"):
        machine.check()
    machine.watch.check()
    assert machine.reads == 1


@pytest.mark.parametrize("limit", [WEIGHTS, WEIGHTS - 50, 0])
def test_weights_that_fill_everything_are_the_highest_level(limit: int) -> None:
    machine = Machine()
    machine.watch._read = lambda: Reading(WEIGHTS, 0, WEIGHTS, limit)
    machine.check()
    assert machine.watch.level is Level.HARD


@pytest.mark.parametrize(
    ("reading", "beside"),
    [(Reading(700, 100, 900, LIMIT), 100), (Reading(700, 100, 300, LIMIT), 0)],
)
def test_the_larger_of_both_numbers_counts(reading: Reading, beside: int) -> None:
    assert reading.beside == beside


def test_memory_beside_mlx_counts_once_it_has_lasted() -> None:
    machine = Machine()
    machine.rows = 800
    machine.check()
    machine.other = 120
    checks = 0
    while not machine.check():
        checks += 1
    assert machine.levels == ["normal -> soft at 1120"]
    assert checks * pressure.INTERVAL == pytest.approx(pressure.SETTLE_SECONDS - pressure.INTERVAL)
    machine.other = 0
    assert machine.check() == []
    assert not machine.watch.pauses


def test_what_the_system_takes_note_of_late_is_no_pressure() -> None:
    machine = Machine()
    machine.cache, machine.pool = 850, 60
    assert machine.check() == ["empty"]
    machine.late = 60
    assert [machine.check() for _ in range(12)] == [[]] * 12
    machine.late = 0
    machine.check()
    assert machine.levels == []


def test_what_is_told_is_read_and_changes_nothing() -> None:
    machine = Machine()
    machine.rows = 950
    told = machine.watch.statistics(wired_limit=77)
    assert (told.level, told.footprint, told.limit, told.wired_limit) == (
        "normal",
        1_150,
        1_200,
        77,
    )
    assert machine.done == []
