"""Who gives a place to whom. Policy only: no MLX, no clock.

A request that is next but lacks a row or memory may take them from rows of a lower priority, and
from rows of its own whose agents have attained more than its own by a slice and that have computed
a slice since they were admitted. The lowest priority goes first, then whose agent has attained
most, then who was admitted last; as few as are needed, and none if all would not be enough. What
they have computed is put, and they go on where they were once it is their turn again.

Nobody is sent to and fro: who was preempted before, or admitted for its age before others of a
higher priority, has its place for a slice. Only what is computed for the first time counts there,
so every admission gets a request ahead.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from ..trace.events import PreemptionReason
from .fairness import Account, ahead_of

SLICE = 1024
"""Tokens that a row computes before others that have attained less get its place. With less, what
putting and taking rows costs would show; with more, so would the wait."""

LOOKS = 16
"""Preemption is looked at so many times a slice, beside whenever requests come or go."""


class Runner(Protocol):
    """A row that runs. `fresh` are the tokens computed for it since it was admitted, those of a
    time before left out. `is_guarded` rows keep their place for a slice. `number` grows with
    admissions. `urgency` is its priority, or that of who waits for what it computes. `lost` tokens
    have to be computed again: when the row was preempted, or since, the cache did not keep them.
    """

    account: Account
    fresh: float
    is_guarded: bool
    number: int
    lost: int

    @property
    def urgency(self) -> int: ...


class Waiter(Protocol):
    """A request whose turn it is."""

    account: Account
    priority: int


Row = TypeVar("Row", bound=Runner)


class Lack(NamedTuple):
    """What a request lacks: whether a row, and bytes of memory."""

    row: bool
    nbytes: float


def is_over(row: Runner, size: int) -> bool:
    """Whether a row has had its slice. One that had to compute much again has a longer one: what is
    computed again stays in proportion to what is not.
    """
    return row.fresh >= max(size, row.lost)


def reason_for(waiter: Waiter, row: Runner, size: int) -> PreemptionReason | None:
    """Why a row has to give its place to a request; None if it may keep it."""
    if row.urgency < waiter.priority and (not row.is_guarded or is_over(row, size)):
        return "priority"
    if row.urgency == waiter.priority and is_over(row, size):
        return "slice" if ahead_of(row.account, waiter.account) >= size else None
    return None


def may_go(row: Runner, highest: int, size: int) -> bool:
    """Whether a row may have to go for somebody, the highest priority of these being known."""
    return row.fresh >= size or row.urgency < highest


def victims(
    waiter: Waiter, rows: Sequence[Row], lack: Lack, promised: Callable[[Row], int], size: int
) -> list[Row]:
    """The rows that give their places to a request, who goes first being first; empty if it must
    not or cannot be helped so. `promised` is the memory that each gives back.
    """
    willing = [row for row in rows if reason_for(waiter, row, size) is not None]
    willing.sort(key=lambda row: _rank(row, waiter.account))
    chosen: list[Row] = []
    for row in willing:
        if _is_enough(chosen, lack, promised):
            break
        chosen.append(row)
    if not _is_enough(chosen, lack, promised):
        return []
    for row in reversed(chosen):
        others = [each for each in chosen if each is not row]
        if _is_enough(others, lack, promised):
            chosen = others
    return chosen


def expendable(rows: Sequence[Row]) -> list[Row]:
    """The rows that go where memory runs short, who goes first being first; the last one stays."""
    if not rows:
        return []
    least = min(rows, key=lambda row: row.account.attained).account
    return sorted(rows, key=lambda row: _rank(row, least))[:-1]


def _rank(row: Runner, beside: Account) -> tuple[float, float, int]:
    return row.urgency, -ahead_of(row.account, beside), -row.number


def _is_enough(chosen: Sequence[Row], lack: Lack, promised: Callable[[Row], int]) -> bool:
    if lack.row and not chosen:
        return False
    return sum(map(promised, chosen)) >= lack.nbytes
