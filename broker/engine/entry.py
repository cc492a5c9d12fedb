"""A request as the scheduler knows it. No MLX."""

from collections.abc import Iterable
from enum import Enum

from ..cache.prefix_hash import Tokens
from ..request import RequestId
from .fairness import Account, Claim
from .work import LanePolicy


class State(Enum):
    QUEUED = "queued"
    WAITING = "waiting"
    RESTORING = "restoring"
    PREFILLING = "prefilling"
    DECODING = "decoding"


class Entry(Claim):
    """One request. `end` is the length to prefill: the last prompt token is left to decoding."""

    def __init__(
        self,
        request: RequestId,
        tokens: Tokens,
        namespace: str | None,
        boundaries: Iterable[int],
        account: Account,
        priority: int,
        max_tokens: int,
        lane: LanePolicy,
        alternatives: int | None,
    ) -> None:
        super().__init__(account, priority, len(tokens) + max_tokens, lane)
        self.request = request
        self.lane: LanePolicy = lane
        self.tokens = tokens
        self.namespace = namespace
        self.alternatives = alternatives
        self.end = len(tokens) - 1
        self.boundaries = frozenset(boundaries)
        self.state = State.QUEUED
        self.position = 0
        self.stored = 0
        self.waits = True
        self.leader: Entry | None = None
        self.followers: dict[Entry, int] = {}
        self.common: dict[RequestId, int] = {}
        self.hopes: dict[Entry, int] = {}
        self.met = 0
        self.in_memory = 0
        self.looked_up_at = -1
        self.asked_priority = priority
        self.reached = self.lost = 0
        self.fresh = 0.0
        self.is_guarded = False
        self.number = 0

    @property
    def urgency(self) -> int:
        """The priority of the request, or of who waits for it."""
        return max([self.asked_priority, *(each.priority for each in self.followers)])

    def next_stop(self, reach: int) -> int:
        """The next position at which to store: a boundary, where a follower parts, or the end.

        Of stops within `reach` tokens the last one serves all.
        """
        stops = [*self.boundaries, *self.followers.values(), self.end]
        ahead = [stop for stop in stops if self.position < stop <= self.end]
        return max(stop for stop in ahead if stop <= min(ahead) + reach)

    def wanted_tokens(self) -> int:
        """How much others want of what is computed: up to a boundary, or where a follower parts."""
        stops = [stop for stop in self.boundaries if stop <= self.position]
        is_whole = self.state is State.DECODING
        stops += [at for at in self.followers.values() if is_whole or at <= self.position]
        return max(stops, default=0)
