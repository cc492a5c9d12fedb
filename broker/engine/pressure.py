"""What is done when memory runs short: levels, and the measures of each in their order. No MLX.

The ledger promises what requests may come to need. This watches what the process really has, which
is more (other libraries, fragments, what MLX keeps for later) and, on a CPU, what others leave it.
"""

import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from msgspec import Struct

SOFT = 0.90
HARD = 0.96
"""Watermarks, as shares of what the limit leaves beside the weights."""

HYSTERESIS = 0.05
"""A level is left so much below the watermark at which it began."""

STEP = 1 / 32
"""What the prompt cache gives up between two checks at the soft level, as such a share."""

INTERVAL = 0.25
"""Seconds between two checks."""

SETTLE_SECONDS = 5.0
"""What a process takes beside MLX counts once it has lasted so long: macOS takes note of memory
that was given back some seconds late (ml-explore/mlx#3896)."""

POOL_SECONDS = 2.0
"""The pool is emptied at most so often: what steps then take is slow to allocate."""


class Level(Enum):
    """Soft: nobody new runs beside others, and the prompt cache shrinks. Hard: and rows may go."""

    NORMAL = "normal"
    SOFT = "soft"
    HARD = "hard"


class Reading(NamedTuple):
    """Bytes. `active` and `pool` are MLX's, in use and kept for later; `footprint` is all that the
    process takes, `limit` what it may take.
    """

    active: int
    pool: int
    footprint: int
    limit: int

    @property
    def beside(self) -> int:
        """What the process takes beside MLX's memory; 0 where MLX counts more than the system."""
        return max(0, self.footprint - self.active - self.pool)


class Measures(NamedTuple):
    """What can be done. `empty_pool()` gives back what MLX, or what it allocates with, keeps for
    later; some of it counts as used until then. `shrink(nbytes)` has the prompt cache give up so
    much, and says whether anything went or is on its way. `preempt(nbytes)` takes it from rows that
    run.
    """

    empty_pool: Callable[[], None]
    shrink: Callable[[int], bool]
    preempt: Callable[[int], None]


class PressureStatistics(Struct, frozen=True, kw_only=True):
    """Bytes now, and the level found at the last check. `wired_limit` is what Metal keeps resident;
    0 where there is no such thing.
    """

    level: str
    active: int
    pool: int
    footprint: int
    limit: int
    wired_limit: int


class MemoryWatch:
    """Checks now and then, and takes the measures of the level that it finds.

    Levels go by the larger of what MLX and what the system says, as it would be with MLX's pool
    empty. `fixed()` are bytes of which no measure frees any: the weights. `on_change(before,
    reading)` is called when `level` has changed.
    """

    def __init__(
        self,
        read: Callable[[], Reading],
        measures: Measures,
        fixed: Callable[[], int],
        on_change: Callable[[Level, Reading], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.level = Level.NORMAL
        self._read = read
        self._measures = measures
        self._fixed = fixed
        self._on_change = on_change
        self._clock = clock
        self._due = self._pool_due = clock()
        self._beside: deque[tuple[float, int]] = deque()

    @property
    def pauses(self) -> bool:
        """Whether nobody new is to run beside others."""
        return self.level is not Level.NORMAL

    def check(self) -> None:
        """Read and act, if it is time; else this costs one look at the clock."""
        if self._clock() < self._due:
            return
        try:
            self._check()
        finally:
            self._due = self._clock() + INTERVAL

    def statistics(self, wired_limit: int) -> PressureStatistics:
        """The numbers now; reads them, and does nothing about them."""
        active, pool, footprint, limit = self._read()
        return PressureStatistics(
            level=self.level.value,
            active=active,
            pool=pool,
            footprint=footprint,
            limit=limit,
            wired_limit=wired_limit,
        )

    def _check(self) -> None:
        reading, now = self._read(), self._clock()
        held = self._held(reading, now)
        is_short = self.pauses or self._share(held + reading.pool, reading.limit) >= SOFT
        if is_short and now >= self._pool_due:
            self._pool_due = now + POOL_SECONDS
            self._measures.empty_pool()
            reading = self._read()
            held = self._held(reading, now)
        before = self.level
        self.level = next_level(before, self._share(held, reading.limit))
        if self.level is not before:
            self._on_change(before, reading)
        if self.level is not Level.NORMAL:
            self._make_room(held, reading.limit)

    def _held(self, reading: Reading, now: float) -> int:
        """What would be taken with MLX's pool empty."""
        beside = self._beside
        while beside and beside[0][0] <= now - SETTLE_SECONDS:
            beside.popleft()
        beside.append((now, reading.beside))
        return reading.active + min(nbytes for _, nbytes in beside)

    def _make_room(self, held: int, limit: int) -> None:
        room = max(0, limit - self._fixed())
        excess = max(0, held - self._fixed() - int((SOFT - HYSTERESIS) * room))
        if self.level is Level.SOFT:
            excess = min(excess, int(STEP * room))
        if self._measures.shrink(excess):
            self._measures.empty_pool()
        elif self.level is Level.HARD:
            self._measures.preempt(excess)

    def _share(self, nbytes: int, limit: int) -> float:
        """What bytes are of all there is, both without what is fixed."""
        fixed = self._fixed()
        return (nbytes - fixed) / (limit - fixed) if limit > fixed else 1.0


def next_level(before: Level, share: float) -> Level:
    """The level at a share, after another: up at a watermark, down only well below it."""
    hard = HARD - HYSTERESIS * (before is Level.HARD)
    soft = SOFT - HYSTERESIS * (before is not Level.NORMAL)
    if share >= hard:
        return Level.HARD
    return Level.SOFT if share >= soft else Level.NORMAL
