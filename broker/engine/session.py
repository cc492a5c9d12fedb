"""One agent's conversation as the policy of `sessions` sees it, and what that tells. No MLX."""

import math
from typing import NamedTuple, Protocol

from msgspec import Struct

from ..request import RequestId
from .fairness import Party
from .footprints import Trail


class Shortage(NamedTuple):
    """Why a session waits, in bytes: what it would add, what the admitted hold, the budget."""

    need: int
    held: int
    budget: float


class SessionsStatistics(Struct, frozen=True, kw_only=True):
    """Sessions that are admitted and that wait to be, the bytes that the former take together, what
    they may take, and how many lost their place to another so far. Pins that are in force, and
    those that were refused.
    """

    admitted: int
    waiting: int
    bytes: int
    budget: int
    replaced: int
    pins: int = 0
    pins_refused: int = 0


class Observer(Protocol):
    """Hears of decisions."""

    def waits(self, request: RequestId, shortage: Shortage) -> None:
        """A request is passed over from now on."""

    def replaced(self, party: Party, last: Trail | None, request: RequestId) -> None:
        """A session, whose last turn left `last`, lost its place to that of a request."""


class Turn:
    """A request of a session that is not over."""

    def __init__(self, request: RequestId, session: "Session", trail: Trail, priority: int) -> None:
        self.request = request
        self.session = session
        self.trail = trail
        self.priority = priority
        self.runs = False


class Session:
    """One conversation. `last` is what its last turn left, `own` how many tokens of it nobody
    shared; `hint` is when its next turn is expected, in seconds from the end of that.
    """

    def __init__(self, party: Party, now: float) -> None:
        self.party = party
        self.turns: dict[RequestId, Turn] = {}
        self.last: Trail | None = None
        self.own = 0
        self.running = 0
        self.service = 0.0
        self.idle_since = now
        self.hint: float | None = None
        self.pinned_until = -math.inf

    @property
    def queued(self) -> list[Turn]:
        """Turns that have not started."""
        return [turn for turn in self.turns.values() if not turn.runs]

    @property
    def trails(self) -> list[Trail]:
        """What its working set consists of while it is admitted."""
        running = [turn.trail for turn in self.turns.values() if turn.runs]
        return running if self.last is None else [*running, self.last]
