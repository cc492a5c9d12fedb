"""Whose turn it is, by what was computed for whom. Policy only: no MLX, no clock of its own.

Service is counted in tokens computed: those of prompts, and one for each decode step of a row. It
is shared among tenants, in a tenant among its swarms, in a swarm among its agents; a request
without an agent is an agent of its own. Who has attained least is next (least attained service).
Who comes, or comes back, begins no lower than the average of those who are there, which is the
virtual time of generalized processor sharing (Parekh and Gallager, 1993): a newcomer does not
starve the others, and being idle saves nothing up.

A higher priority goes first, until a lower one has gone unserved for `AGING_SECONDS` a level
longer: then it has one turn. Once in `AGING_SECONDS` a turn of each priority goes to who has waited
longest, so that everybody's turn comes, whatever arrives. Those of each lane age on their own: what
is served in one lane is no help to who waits for a place in another.

Rows are taken from those who run once others are a slice behind (`preemption`). So agents who
always have requests queued differ, in what was computed for them, by no more than a slice, a
quantum and a chunk for each row and once more. Where requests are shorter than that it is as much
as all rows compute for one request each, or a quantum a row if that is more and they end long
before they have to. A request of which the cache did not keep all has longer slices, as long as
what it has to compute again.
"""

from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

QUANTUM = 256
"""Tokens that a request with a row pays for ahead, or as many as it can come to: about what one
costs. With less, who is behind would get more rows than it takes to catch up."""

PREFILL_QUANTUM = 1024
"""Who is ahead of others by as many tokens lets them compute their prompts first. With less, all of
those who come together would get their first token as late as the last of them."""

AGING_SECONDS = 10.0
"""What a level of priority is worth in waiting, and how often a turn goes by age alone."""

SCAN_AT_LEAST = 16

Clock = Callable[[], float]


class Party(NamedTuple):
    """For whom a request is computed."""

    tenant: str = ""
    swarm: str = ""
    agent: str = ""


class Account:
    """What somebody has attained, in tokens, on the scale of those under the same parent.

    `average` is the scale of its own members: what one of them has on average. `open` and `queued`
    count requests, those of members included. `path` leads here from the root.
    """

    def __init__(self, parent: "Account | None" = None, name: str = "") -> None:
        self.average = 0.0
        self.attained: float = parent.average if parent else 0.0
        self.path: tuple[Account, ...] = (*parent.path, self) if parent else (self,)
        self.name = name
        self.open = self.queued = 0
        self._members: dict[str, Account] = {}
        self._active = 0
        self._scan_at = SCAN_AT_LEAST

    def agent(self, party: Party) -> "Account":
        """Of the root: what a party's requests are charged to."""
        swarm = self._member(party.tenant)._member(party.swarm)
        return swarm._member(party.agent) if party.agent else Account(swarm)

    def charge(self, tokens: float) -> None:
        """Tokens were computed."""
        for parent, account in pairwise(self.path):
            account.attained += tokens
            parent.average += tokens / parent._active

    def pay(self, tokens: float) -> None:
        """Tokens are paid for before they are computed, or, if negative, given back."""
        for account in self.path[1:]:
            account.attained += tokens

    def begin(self) -> None:
        """A request has come."""
        for parent, account in pairwise(self.path):
            parent._active += not account.open
        for account in self.path:
            account.open += 1

    def end(self) -> None:
        """A request is over. What nobody has a use for any more is forgotten."""
        for account in self.path:
            account.open -= 1
        for account, parent in pairwise(reversed(self.path)):
            if not account.open:
                parent._active -= 1
                parent._forget()

    def queue(self) -> None:
        """A request waits for a row: who had none that did has saved nothing up."""
        for parent, account in pairwise(self.path):
            if not account.queued:
                account.attained = max(account.attained, parent.average)
        for account in self.path:
            account.queued += 1

    def requeue(self) -> None:
        """A request that gave up its row waits for one again: it was not idle."""
        for account in self.path:
            account.queued += 1

    def leave_queue(self) -> None:
        """A request waits for a row no more."""
        for account in self.path:
            account.queued -= 1

    def check_integrity(self) -> None:
        """Assert what must always hold."""
        assert 0 <= self.queued <= self.open
        assert self._active <= self.open
        for member in self._members.values():
            member.check_integrity()

    def size(self) -> int:
        """How many accounts there are under this one."""
        return len(self._members) + sum(member.size() for member in self._members.values())

    def _member(self, name: str) -> "Account":
        if name not in self._members:
            self._members[name] = Account(self, name)
        return self._members[name]

    def _forget(self) -> None:
        """Forget members without requests that are no worse off as newcomers."""
        if not self._active:
            self._members.clear()
            self.average = 0.0
        elif len(self._members) > self._scan_at:
            kept = (m for m in self._members.values() if m.open or m.attained > self.average)
            self._members = {member.name: member for member in kept}
            self._scan_at = max(2 * len(self._members), SCAN_AT_LEAST)


class Claim:
    """What one request claims: for whom, how urgently, at `most` how many tokens, in which `lane`
    (any key), and what it has paid for ahead.
    """

    def __init__(self, account: Account, priority: int, most: int, lane: object = None) -> None:
        self.account = account
        self.priority = priority
        self.lane = lane
        self._quantum = min(most, QUANTUM)
        self._ahead: float | None = None
        account.begin()

    def start(self) -> None:
        """The request has a row: it pays ahead, so that nobody gets all rows before paying."""
        if self._ahead is None:
            self._ahead = self._quantum
            self.account.pay(self._quantum)

    def compute(self, tokens: float) -> None:
        """Tokens were computed for the request, which has a row."""
        assert self._ahead is not None
        self._ahead -= tokens
        if self._ahead < 0:
            self._settle(self._ahead)

    def stop(self) -> None:
        """The request has no row any more: what it has paid for and did not need is given back."""
        if self._ahead is not None:
            self._settle(self._ahead)
            self.account.pay(-self._quantum)
            self._ahead = None

    def close(self) -> None:
        """The request is over."""
        self.stop()
        self.account.end()

    def _settle(self, ahead: float) -> None:
        self.account.charge(self._quantum - ahead)
        self._ahead = self._quantum


exactly: Callable[[Account], float] = attrgetter("attained")
"""What an account has attained, to the token."""


def ahead_of(one: Account, other: Account) -> float:
    """By how much one has attained more than another, both or those they belong to being members
    of the same; 0 for the same account.
    """
    pairs = zip(one.path, other.path, strict=True)
    return next((a.attained - b.attained for a, b in pairs if a is not b), 0.0)


def roughly(account: Account) -> float:
    """What an account has attained, in whole quanta of prefill."""
    return account.attained // PREFILL_QUANTUM


ClaimType = TypeVar("ClaimType", bound=Claim)


class Level(Generic[ClaimType]):
    """The claims of one priority in one lane, in order of arrival, and how they age.

    `unserved_since` is when one of them had a turn last, `by_age_at` when one had it by age alone.
    `held` is who stays the next.
    """

    def __init__(self, priority: int, now: float) -> None:
        self.priority = priority
        self.claims: dict[ClaimType, None] = {}
        self.unserved_since = self.by_age_at = now
        self.held: ClaimType | None = None

    def raised(self, now: float) -> float:
        """The priority, with what was waited for it."""
        return self.priority + (now - self.unserved_since) / AGING_SECONDS

    def aged(self, now: float) -> ClaimType | None:
        """Who has waited longest, if it is time to ask."""
        is_time = now - self.by_age_at >= AGING_SECONDS
        return next(iter(self.claims)) if is_time else None

    def first(self, now: float) -> ClaimType | None:
        """Who comes before its turn."""
        return self.held or self.aged(now)


class FairQueue(Generic[ClaimType]):
    """Claims, and whose turn it is. Of accounts with as many `quanta` those come first that did.

    `claims` are all of them, in order of arrival.
    """

    def __init__(self, clock: Clock, quanta: Callable[[Account], float] = exactly) -> None:
        self.claims: dict[ClaimType, None] = {}
        self._clock = clock
        self._quanta = quanta
        self._front: dict[ClaimType, None] = {}
        # By priority, tenant, swarm and agent; dicts for their cheap removal.
        self._waiting: dict[Any, Any] = {}
        self._levels: dict[tuple[int, object], Level[ClaimType]] = {}

    def __len__(self) -> int:
        return len(self.claims)

    def __contains__(self, claim: ClaimType) -> bool:
        return claim in self.claims

    @property
    def highest(self) -> int | None:
        """The highest priority of a claim."""
        return max([*self._waiting, *(claim.priority for claim in self._front)], default=None)

    def add(self, claim: ClaimType, *, front: bool = False, back: bool = False) -> None:
        """Line up; with `front` before everybody. Who comes `back` is first of its agent's."""
        self.claims[claim] = None
        if front:
            self._front = {claim: None, **self._front}
            return
        key = claim.priority, claim.lane
        if key not in self._levels:
            self._levels[key] = Level(claim.priority, self._clock())
        self._levels[key].claims[claim] = None
        level = self._waiting
        for step in _steps(claim):
            level = level.setdefault(step, {})
        others = dict(level) if back else {}
        if back:
            level.clear()
        level[claim] = None
        level.update(others)

    def advance(self, claim: ClaimType) -> None:
        """A claim, which is here, has its turn now: before everybody."""
        if claim not in self._front:
            self.served(claim)
            self.discard(claim)
            self.add(claim, front=True)

    def discard(self, claim: ClaimType) -> None:
        """Leave, if it is there."""
        if claim not in self.claims:
            return
        del self.claims[claim]
        if claim in self._front:
            del self._front[claim]
            return
        steps, levels = _steps(claim), [self._waiting]
        for step in steps:
            levels.append(levels[-1][step])
        del levels.pop()[claim]
        for parent, step in zip(reversed(levels), reversed(steps), strict=True):
            if parent[step]:
                break
            del parent[step]
        level = self._level(claim)
        del level.claims[claim]
        if level.held is claim:
            level.held = None
        if not level.claims:
            del self._levels[claim.priority, claim.lane]

    def served(self, claim: ClaimType) -> None:
        """The claim, which is here, had its turn: those of its level age anew."""
        if claim in self._front:
            return
        now, level = self._clock(), self._level(claim)
        if level.aged(now) is claim:
            level.by_age_at = now
        level.unserved_since = now

    def hold(self, claim: ClaimType) -> bool:
        """It is the claim's turn, but it has to wait: of its level it stays the next. Whether that
        is new.
        """
        is_new = claim not in self._front and self._level(claim).held is not claim
        if is_new:
            self._level(claim).held = claim
        return is_new

    def raise_to(self, claim: ClaimType, priority: int) -> None:
        """Make a claim as urgent as another that waits for it."""
        if priority > claim.priority and claim in self.claims:
            self.discard(claim)
            claim.priority = priority
            self.add(claim)

    def in_turn(self) -> Iterator[ClaimType]:
        """All claims, whose turn it is first. To be begun anew after any change."""
        yield from list(self._front)
        now = self._clock()
        levels = list(self._levels.values())
        # Ties are of one priority as a whole, so that its lanes stay together.
        levels.sort(key=lambda level: (level.raised(now), level.priority), reverse=True)
        for priority, group in groupby(levels, key=lambda level: level.priority):
            yield from self._of_levels(priority, list(group), now)

    def check_integrity(self) -> None:
        """Assert what must always hold."""
        in_turn = list(self.in_turn())
        assert len(in_turn) == len(self.claims)
        assert set(in_turn) == self.claims.keys()
        assert {priority for priority, _ in self._levels} == self._waiting.keys()
        assert all(level.claims for level in self._levels.values())
        assert all(level.held in (None, *level.claims) for level in self._levels.values())

    def _level(self, claim: ClaimType) -> Level[ClaimType]:
        return self._levels[claim.priority, claim.lane]

    def _of_levels(
        self, priority: int, levels: list[Level[ClaimType]], now: float
    ) -> Iterator[ClaimType]:
        """The claims of one priority in some of the lanes."""
        firsts = {first: None for level in levels if (first := level.first(now)) is not None}
        yield from firsts
        for claim in self._by_service(self._waiting[priority]):
            if claim not in firsts and any(claim in level.claims for level in levels):
                yield claim

    def _by_service(self, tenants: dict[Any, Any]) -> Iterator[ClaimType]:
        for tenant in sorted(tenants, key=self._quanta):
            swarms = tenants[tenant]
            for swarm in sorted(swarms, key=self._quanta):
                agents = swarms[swarm]
                for agent in sorted(agents, key=self._quanta):
                    yield from list(agents[agent])


def _steps(claim: Claim) -> tuple[Any, ...]:
    return (claim.priority, *claim.account.path[1:])
