"""The memory ledger: promises, use, limits, and refusals that carry the numbers."""

import threading

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from mlx_swarm.broker.cache.ledger import Ledger, Purpose, Reservation, format_bytes
from mlx_swarm.broker.errors import OutOfMemory

MIB = 2**20
purposes = st.sampled_from(list(Purpose))
amounts = st.integers(0, 60)


def test_a_reservation_gives_back_what_was_not_taken() -> None:
    ledger = Ledger(100)
    with ledger.reserve(Purpose.TAILS, 60) as reservation:
        assert ledger.free == 40
        reservation.commit(25)
        assert ledger.used(Purpose.TAILS) == 60
    assert ledger.used(Purpose.TAILS) == 25
    ledger.release(Purpose.TAILS, 25)
    assert ledger.free == 100


def test_another_amount_can_be_promised_instead() -> None:
    ledger = Ledger(100)
    ledger.charge(Purpose.WEIGHTS, 30)
    reservation = ledger.reserve(Purpose.TAILS, 40)
    with pytest.raises(OutOfMemory, match="31 B; 30 B free"):
        reservation.resize(71)
    assert reservation.remaining == ledger.used(Purpose.TAILS) == 40
    reservation.resize(70)
    assert (reservation.remaining, ledger.free) == (70, 0)
    ledger.charge(Purpose.SPILLS, 50)
    reservation.resize(60)
    assert (reservation.remaining, ledger.total) == (60, 140)
    reservation.cancel()
    ledger.check_integrity()


def test_an_error_in_the_block_gives_everything_back() -> None:
    ledger = Ledger(100)
    with pytest.raises(RuntimeError), ledger.reserve(Purpose.RESTORES, 60):
        raise RuntimeError
    assert ledger.free == 100


def test_a_refusal_carries_the_numbers_and_changes_nothing() -> None:
    ledger = Ledger(3 * 2**30, {Purpose.WORKSPACE: 200 * MIB})
    ledger.charge(Purpose.WEIGHTS, 2 * 2**30)
    before = ledger.statistics()
    with pytest.raises(OutOfMemory) as refused:
        ledger.reserve(Purpose.EXTENTS, 1536 * MIB)
    assert str(refused.value) == (
        "extents need 1.5 GiB; 1.0 GiB free of 3.0 GiB; in use: weights 2.0 GiB"
    )
    with pytest.raises(OutOfMemory, match=r"200.0 MiB free .*\(workspace at most 200.0 MiB\)"):
        ledger.reserve(Purpose.WORKSPACE, 201 * MIB)
    after = ledger.statistics()
    assert (after.committed, after.reserved) == (before.committed, before.reserved)
    assert after.refusals == 2


def test_what_is_there_is_charged_even_above_the_limit() -> None:
    ledger = Ledger(100)
    ledger.charge(Purpose.WEIGHTS, 130)
    assert ledger.free == 0
    assert ledger.total == 130
    with pytest.raises(OutOfMemory):
        ledger.reserve(Purpose.TAILS, 1)
    ledger.reserve(Purpose.TAILS, 0)


def test_more_may_be_committed_than_was_promised() -> None:
    ledger = Ledger(100)
    with ledger.reserve(Purpose.SPILLS, 10) as reservation:
        reservation.commit(30)
    assert ledger.statistics().committed["spills"] == 30
    assert ledger.statistics().reserved["spills"] == 0


def test_what_can_never_fit_is_told_from_what_cannot_now() -> None:
    ledger = Ledger(100)
    ledger.charge(Purpose.WEIGHTS, 40)
    ledger.charge(Purpose.EXTENTS, 50)
    assert ledger.available(Purpose.TAILS) == 10
    assert ledger.fits_ever(Purpose.TAILS, 60)
    assert not ledger.fits_ever(Purpose.TAILS, 61)
    assert not ledger.fits_ever(Purpose.TAILS, 11, fixed=[Purpose.EXTENTS])


def test_more_can_not_be_released_than_is_in_use() -> None:
    ledger = Ledger(100)
    ledger.charge(Purpose.TAILS, 5)
    with pytest.raises(AssertionError):
        ledger.release(Purpose.TAILS, 6)


def test_threads_may_share_it() -> None:
    ledger = Ledger(10**9)

    def work() -> None:
        for _ in range(500):
            with ledger.reserve(Purpose.RESTORES, 3) as reservation:
                reservation.commit(2)
            ledger.release(Purpose.RESTORES, 2)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ledger.check_integrity()
    assert ledger.free == 10**9


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (5 * 2**30, "5.0 GiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_bytes_read_well(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


class LedgerMachine(RuleBasedStateMachine):
    """Random use against two dictionaries of numbers."""

    reservations: Bundle[Reservation] = Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(100, {Purpose.TAILS: 30})
        self.committed = dict.fromkeys(Purpose, 0)
        self.promised: dict[Reservation, int] = {}

    def total(self) -> int:
        return sum(self.committed.values()) + sum(self.promised.values())

    @rule(target=reservations, purpose=purposes, nbytes=amounts)
    def reserve(self, purpose: Purpose, nbytes: int) -> Reservation:
        room = max(0, 100 - self.total())
        if purpose is Purpose.TAILS:
            used = self.committed[purpose] + sum(
                amount for each, amount in self.promised.items() if each.purpose is purpose
            )
            room = max(0, min(room, 30 - used))
        assert self.ledger.available(purpose) == room
        if nbytes > room:
            with pytest.raises(OutOfMemory):
                self.ledger.reserve(purpose, nbytes)
            nbytes = 0
        reservation = self.ledger.reserve(purpose, nbytes)
        self.promised[reservation] = nbytes
        return reservation

    @rule(reservation=reservations, nbytes=amounts)
    def commit(self, reservation: Reservation, nbytes: int) -> None:
        reservation.commit(nbytes)
        self.promised[reservation] = max(0, self.promised[reservation] - nbytes)
        self.committed[reservation.purpose] += nbytes

    @rule(reservation=consumes(reservations))
    def cancel(self, reservation: Reservation) -> None:
        reservation.cancel()
        reservation.cancel()
        del self.promised[reservation]

    @rule(purpose=purposes, nbytes=amounts)
    def release(self, purpose: Purpose, nbytes: int) -> None:
        nbytes = min(nbytes, self.committed[purpose])
        self.ledger.release(purpose, nbytes)
        self.committed[purpose] -= nbytes

    @invariant()
    def agrees(self) -> None:
        self.ledger.check_integrity()
        assert self.ledger.total == self.total()
        assert self.ledger.free == max(0, 100 - self.total())


TestLedgerMachine = LedgerMachine.TestCase
