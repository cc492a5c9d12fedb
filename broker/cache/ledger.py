"""One account of memory for everything that takes some. No MLX."""

import threading
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Self

from msgspec import Struct

from ..errors import OutOfMemory


class Purpose(Enum):
    """What memory is taken for."""

    WEIGHTS = "weights"
    EXTENTS = "extents"
    CHECKPOINTS = "checkpoints"
    TAILS = "tails"
    RESTORES = "restores"
    SPILLS = "spills"
    WORKSPACE = "workspace"


class LedgerStatistics(Struct, frozen=True, kw_only=True):
    """Bytes. `committed` is in use, `reserved` is promised; `peak` is of their sum."""

    limit: int
    free: int
    committed: dict[str, int]
    reserved: dict[str, int]
    peak: int
    refusals: int


class Reservation:
    """Bytes promised for one purpose: commit what was taken; leaving the block returns the rest."""

    __slots__ = ("_ledger", "purpose", "remaining")

    def __init__(self, ledger: "Ledger", purpose: Purpose, remaining: int) -> None:
        self._ledger = ledger
        self.purpose = purpose
        self.remaining = remaining

    def commit(self, nbytes: int | None = None) -> None:
        """Turn promised bytes (default: all that remain) into used ones.

        What was taken may exceed the promise: it is charged in full, because it is there.
        """
        self._ledger._commit(self, self.remaining if nbytes is None else nbytes)

    def resize(self, nbytes: int) -> None:
        """Promise so many bytes instead of those that remain; fewer always are granted. Raises
        `OutOfMemory` and changes nothing.
        """
        self._ledger._resize(self, nbytes)

    def cancel(self) -> None:
        """Give back what remains; harmless when repeated."""
        self._ledger._cancel(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.cancel()


class Ledger:
    """Bytes by purpose under one limit, with optional limits for single purposes.

    The limits come from outside. `reserve` before memory is taken, `commit` once it is, `release`
    when it is gone. Threads may share it: the cold reader and writer charge what they hold.
    """

    def __init__(self, limit: int, limits: Mapping[Purpose, int] | None = None) -> None:
        self._limit = limit
        self._limits = dict(limits or {})
        self._committed = dict.fromkeys(Purpose, 0)
        self._reserved = dict.fromkeys(Purpose, 0)
        self._open: set[Reservation] = set()
        self._peak = 0
        self._refusals = 0
        self._lock = threading.Lock()

    @property
    def limit(self) -> int:
        """Bytes that may be taken in all."""
        return self._limit

    @property
    def free(self) -> int:
        """Bytes neither used nor promised; 0 where more is used than the limit allows."""
        return max(0, self._limit - self._taken())

    @property
    def total(self) -> int:
        """Bytes used or promised, for all purposes."""
        return self._taken()

    def used(self, purpose: Purpose) -> int:
        """Bytes used or promised for one purpose."""
        return self._committed[purpose] + self._reserved[purpose]

    def available(self, purpose: Purpose) -> int:
        """Bytes that `reserve` would grant for a purpose now."""
        with self._lock:
            return self._available(purpose)

    def reserve(self, purpose: Purpose, nbytes: int) -> Reservation:
        """Promise bytes before they are taken. Raises `OutOfMemory` and changes nothing."""
        assert nbytes >= 0, nbytes
        with self._lock:
            self._require(purpose, nbytes)
            reservation = Reservation(self, purpose, nbytes)
            self._reserved[purpose] += nbytes
            self._open.add(reservation)
            self._note_peak()
        return reservation

    def charge(self, purpose: Purpose, nbytes: int) -> None:
        """Record bytes that are taken already, whatever the limit says (weights, say)."""
        assert nbytes >= 0, nbytes
        with self._lock:
            self._committed[purpose] += nbytes
            self._note_peak()

    def release(self, purpose: Purpose, nbytes: int) -> None:
        """Bytes in use are gone. Asserts that no more are released than are in use."""
        with self._lock:
            assert 0 <= nbytes <= self._committed[purpose], (purpose, nbytes)
            self._committed[purpose] -= nbytes

    def fits_ever(self, purpose: Purpose, nbytes: int, fixed: Iterable[Purpose] = ()) -> bool:
        """Whether `nbytes` could be granted once all but weights and `fixed` are empty."""
        kept = {Purpose.WEIGHTS, *fixed} - {purpose}
        with self._lock:
            rest = self._limit - sum(self._committed[each] for each in kept)
            return nbytes <= min(rest, self._limits.get(purpose, rest))

    def statistics(self) -> LedgerStatistics:
        """The whole account."""
        with self._lock:
            return LedgerStatistics(
                limit=self._limit,
                free=max(0, self._limit - self._taken()),
                committed={each.value: n for each, n in self._committed.items()},
                reserved={each.value: n for each, n in self._reserved.items()},
                peak=self._peak,
                refusals=self._refusals,
            )

    def check_integrity(self) -> None:
        """Assert that nothing is negative and that promises add up."""
        with self._lock:
            assert all(n >= 0 for n in self._committed.values()), self._committed
            promised = dict.fromkeys(Purpose, 0)
            for reservation in self._open:
                promised[reservation.purpose] += reservation.remaining
            assert promised == self._reserved, (promised, self._reserved)

    def _commit(self, reservation: Reservation, nbytes: int) -> None:
        assert nbytes >= 0, nbytes
        with self._lock:
            kept = min(nbytes, reservation.remaining)
            reservation.remaining -= kept
            self._reserved[reservation.purpose] -= kept
            self._committed[reservation.purpose] += nbytes
            self._note_peak()

    def _resize(self, reservation: Reservation, nbytes: int) -> None:
        assert reservation in self._open
        more = nbytes - reservation.remaining
        with self._lock:
            if more > 0:
                self._require(reservation.purpose, more)
            reservation.remaining = nbytes
            self._reserved[reservation.purpose] += more
            self._note_peak()

    def _cancel(self, reservation: Reservation) -> None:
        with self._lock:
            self._reserved[reservation.purpose] -= reservation.remaining
            reservation.remaining = 0
            self._open.discard(reservation)

    def _taken(self) -> int:
        return sum(self._committed.values()) + sum(self._reserved.values())

    def _available(self, purpose: Purpose) -> int:
        free = self._limit - self._taken()
        if purpose in self._limits:
            free = min(free, self._limits[purpose] - self.used(purpose))
        return max(0, free)

    def _require(self, purpose: Purpose, nbytes: int) -> None:
        if nbytes > self._available(purpose):
            self._refusals += 1
            raise OutOfMemory(self._refusal(purpose, nbytes))

    def _note_peak(self) -> None:
        self._peak = max(self._peak, self._taken())

    def _refusal(self, purpose: Purpose, nbytes: int) -> str:
        shares = ", ".join(
            f"{each.value} {format_bytes(self.used(each))}" for each in Purpose if self.used(each)
        )
        message = (
            f"{purpose.value} need {format_bytes(nbytes)}; "
            f"{format_bytes(self._available(purpose))} free of {format_bytes(self._limit)}"
        )
        if purpose in self._limits:
            message += f" ({purpose.value} at most {format_bytes(self._limits[purpose])})"
        return f"{message}; in use: {shares or 'nothing'}"


def format_bytes(nbytes: int) -> str:
    """A byte count for people: 512 B, 1.5 KiB, 3.2 GiB."""
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
