"""Which agents' conversations are in memory at a time, and who waits. Policy only: no MLX.

A session is an agent of a swarm; its working set is the KV of its present or last turn, what it
shares with others counted once. As long as the working sets of all fit the budget nothing is
decided here. Beyond that only the turns of *admitted* sessions start, so that their KV is still
there when they come back; a session that is not waits, and others pass it.

An admitted session that rests keeps its place as long as that is worth it: until its next turn is
expected, or for as long as it would take to compute its own KV again, and once more for each row
that runs (a row without work is one row; computing holds up all); less where few of its swarm came
back in such a time. Who waits takes the places of those whose time is over. Who has waited for
`AGING_SECONDS` takes, one after the other, those of the sessions that have had most service since
they were admitted, as often as the recomputing stays a small part; until there is room for it, who
leaves it none does not start. Where the conversation of an admitted session grows beyond the
budget, those make room that have least to lose. A prompt that would not fit if it had all of the
budget cannot be kept, whoever waits for it: it is none of these, and starts like a request without
an agent.
"""

import math
from collections.abc import Callable, Iterator

from ..request import RequestId
from .fairness import AGING_SECONDS, Clock, Party
from .footprints import Footprints, Trail
from .session import Observer, Session, SessionsStatistics, Shortage, Turn

SWAP_SHARE = 8
"""Places change by age as often as to spend one second in so many on computing again."""

RECENT = 2
"""Of how many sessions that rested what became tells whether the next one comes back."""

SESSION_IDLE_SECONDS = 600.0
"""A session that has rested for so long is forgotten; it is a new one when it comes back."""


class Sessions:
    """Says which requests may start; told of their arrival, start and end.

    The admitted may take `budget` bytes together, or one of them alone whatever it takes.
    `recompute(tokens)` is how many seconds it takes to compute so many. Requests that it was never
    told of may always start.
    """

    def __init__(
        self,
        budget: float,
        clock: Clock,
        recompute: Callable[[int], float],
        observer: Observer | None = None,
    ) -> None:
        self.budget = budget
        self._clock = clock
        self._recompute = recompute
        self._observer = observer
        self._table: dict[Party, Session] = {}
        self._turns: dict[RequestId, Turn] = {}
        self._admitted: dict[Session, None] = {}
        self._footprints = Footprints()
        # Since when sessions wait that were passed over.
        self._waiting: dict[Session, float] = {}
        # By tenant and swarm, what part of those came back of whom nobody knew whether they would.
        self._returning: dict[tuple[str, str], float] = {}
        self._running = 0
        self._replaced = 0
        self._forgets_at = -math.inf
        self._aged_at = -math.inf
        # What holds until something changes or the time comes: whose turn it is by age, whether
        # new sessions have to wait, and what the last request that may start displaces.
        self._looks_again_at = -math.inf
        self._heir: Session | None = None
        self._is_full = False
        self._agreed: tuple[RequestId, list[Session]] | None = None

    def arrived(self, request: RequestId, party: Party, trail: Trail, priority: int = 0) -> None:
        """A request was queued, whose prompt and longest output are `trail`."""
        if trail.prompt_bytes > self.budget:
            return
        session = self._table.setdefault(party, Session(party, self._clock()))
        self._turns[request] = session.turns[request] = Turn(request, session, trail, priority)
        self._changed()

    def may_start(self, request: RequestId) -> bool:
        """Whether a request whose turn it is may start now; if not, those behind it may."""
        turn = self._turns.get(request)
        if turn is None or turn.runs:
            return True
        now = self._clock()
        if now >= self._looks_again_at:
            self._look(now)
        if self._agreed is not None and self._agreed[0] == request:
            return True
        session = turn.session
        if self._is_full and session not in self._admitted and session is not self._heir:
            self._wait(turn, now)
            return False
        displaced = self._displaced(turn, now)
        if displaced is None:
            self._is_full |= session not in self._admitted
            self._wait(turn, now)
            return False
        self._agreed = request, displaced
        return True

    def started(self, request: RequestId) -> None:
        """A request that may start does. Again, after a wait in between, changes nothing."""
        turn = self._turns.get(request)
        if turn is None or turn.runs:
            return
        session, now = turn.session, self._clock()
        displaced = self._agreed[1] if self._agreed and self._agreed[0] == request else []
        if session is self._heir and displaced:
            missed = self._recompute(len(turn.trail) - self._footprints.shared(turn.trail))
            self._aged_at = now + max(AGING_SECONDS, SWAP_SHARE * missed)
        for each in displaced:
            self._replace(each, request)
        if session.last is not None:
            self._learn(session, came_back=True)
            self._footprints.remove(session.last)
            session.last = None
        if session not in self._admitted:
            self._admitted[session] = None
            session.service = 0.0
        self._footprints.add(turn.trail)
        turn.runs, session.running = True, session.running + 1
        self._running += 1
        session.hint = None
        self._waiting.pop(session, None)
        self._changed()

    def ended(
        self,
        request: RequestId,
        kept: Trail | None = None,
        service: float = 0.0,
        hint: float | None = None,
    ) -> float | None:
        """A request is over, which computed `service` tokens; memory has `kept` of it.

        `hint` is in how many seconds the session's next turn is expected; inf for never. What was
        said meanwhile goes before that: returned is what holds.
        """
        turn = self._turns.pop(request, None)
        if turn is None:
            return hint
        session, now = turn.session, self._clock()
        del session.turns[request]
        if turn.runs:
            self._footprints.remove(turn.trail)
            self._running -= 1
            session.running -= 1
            session.service += service
            session.idle_since = now
            session.hint = hint if session.hint is None else session.hint
            if not session.running and kept is not None:
                session.own = len(kept) - self._footprints.shared(kept)
                session.last = kept
                self._footprints.add(kept)
        hint = session.hint
        self._settle(session)
        if now >= self._forgets_at:
            self._forgets_at = now + AGING_SECONDS
            self.forget()
        return hint

    def expect(self, party: Party, seconds: float) -> Trail | None:
        """A session's next turn is expected in so many seconds, or, with inf, never.

        Returns what its last turn left, if it rests.
        """
        session = self._table.get(party)
        if session is None:
            return None
        last = session.last
        resting = 0.0 if session.running else self._clock() - session.idle_since
        session.hint = resting + seconds
        self._settle(session)
        return last

    def pinned(self, party: Party, seconds: float) -> None:
        """A session keeps its place for so many seconds from now."""
        session = self._table.get(party)
        if session is not None:
            session.pinned_until = self._clock() + seconds
            self._changed()

    def last(self, party: Party) -> Trail | None:
        """What memory should have of a session: of its last turn, or one that runs."""
        session = self._table.get(party)
        return session.trails[-1] if session is not None and session.trails else None

    def members(self, tenant: str, swarm: str) -> list[Party]:
        """The sessions of a swarm."""
        return [party for party in self._table if party[:2] == (tenant, swarm)]

    def forget(self) -> None:
        """Forget sessions that have rested for long."""
        before = self._clock() - SESSION_IDLE_SECONDS
        for session in list(self._admitted):
            if not session.turns and session.idle_since <= before:
                self._dismiss(session)
        swarms = {party[:2] for party in self._table}
        self._returning = {at: part for at, part in self._returning.items() if at in swarms}

    def next_change(self) -> float:
        """When a session that waits may be able to start although nothing else happens."""
        is_known = self._waiting and self._looks_again_at > -math.inf
        return self._looks_again_at if is_known else math.inf

    def is_due(self) -> bool:
        """Whether that time has come; told once."""
        if self.next_change() > self._clock():
            return False
        self._changed()
        return True

    def statistics(self) -> SessionsStatistics:
        """How many there are, and what they take."""
        return SessionsStatistics(
            admitted=len(self._admitted),
            waiting=len(self._waiting),
            bytes=self._footprints.total,
            budget=int(min(self.budget, 1 << 62)),
            replaced=self._replaced,
        )

    def check_integrity(self) -> None:
        """Assert what must always hold."""
        assert self._footprints.total <= self.budget or len(self._admitted) == 1
        trails = [trail for session in self._admitted for trail in session.trails]
        self._footprints.check_integrity(trails)
        sessions = self._table.values()
        assert sum(len(session.turns) for session in sessions) == len(self._turns)
        assert sum(session.running for session in sessions) == self._running
        for session in sessions:
            assert session.turns or session in self._admitted
            assert session.running == len(session.turns) - len(session.queued)
            assert session in self._admitted or not session.trails
            assert session.trails or session not in self._admitted
        assert self._waiting.keys() | self._admitted.keys() <= set(sessions)
        assert all(session.queued for session in self._waiting)

    def _look(self, now: float) -> None:
        """Begin anew after a change."""
        self._is_full, self._agreed, self._heir = False, None, None
        self._looks_again_at = math.inf
        if now >= self._aged_at:
            old = [each for each, since in self._waiting.items() if now >= since + AGING_SECONDS]
            self._heir = max(old, key=lambda each: self._urgency(each, now), default=None)

    def _urgency(self, session: Session, now: float) -> float:
        priority = max(turn.priority for turn in session.queued)
        return priority + (now - self._waiting[session]) / AGING_SECONDS

    def _changed(self) -> None:
        self._looks_again_at = -math.inf

    def _displaced(self, turn: Turn, now: float) -> list[Session] | None:
        """Who has to lose its place for a turn to start; None if it has to wait."""
        session, heir = turn.session, self._heir
        if heir not in (None, session) and not self._leaves_room(turn, heir):
            return None
        fits = self._footprints.total + self._footprints.adds(turn.trail) <= self.budget
        if session not in self._admitted and session is not heir:
            if (not fits or self._waiting) and self._comes_after(turn):
                return None
        return [] if fits else self._enough(turn, self._candidates(session, now))

    def _comes_after(self, turn: Turn) -> bool:
        """Whether admitted sessions have turns queued that go before one of a new session."""
        turns = (each for session in self._admitted for each in session.queued)
        return any(each.priority >= turn.priority for each in turns)

    def _leaves_room(self, turn: Turn, heir: Session | None) -> bool:
        """Whether a turn may run beside those that do and the one that is next by age."""
        assert heir is not None
        footprints = Footprints(each.trail for each in self._turns.values() if each.runs)
        footprints.add(turn.trail)
        return footprints.total + footprints.adds(heir.queued[0].trail) <= self.budget

    def _candidates(self, session: Session, now: float) -> list[Session]:
        """Who may lose its place for a session, the first to do so first: by age who has had most,
        else who has least to lose.
        """
        resting = [each for each in self._admitted if not each.running and each is not session]
        if session is not self._heir and (session not in self._admitted or self._running):
            resting = [each for each in resting if each.pinned_until <= now]
        if session is not self._heir and session not in self._admitted:
            resting = [each for each in resting if self._is_over(each, now)]
        return sorted(
            resting,
            key=lambda each: (
                each.pinned_until > now,
                bool(each.turns),
                not self._is_over(each, now),
                -each.service if session is self._heir else each.own,
            ),
        )

    def _enough(self, turn: Turn, candidates: list[Session]) -> list[Session] | None:
        """As many of the candidates as make room for a turn; None if all of them do not."""
        session, left = turn.session, self._footprints.copy()
        if session.last is not None:
            left.remove(session.last)
        for count, each in enumerate([None, *candidates]):
            for trail in each.trails if each is not None else ():
                left.remove(trail)
            is_alone = len(left) == session.running
            if is_alone or left.total + left.adds(turn.trail) <= self.budget:
                return candidates[:count]
        return None

    def _is_over(self, session: Session, now: float) -> bool:
        return not session.turns and now >= self._keeps_until(session)

    def _keeps_until(self, session: Session) -> float:
        """Until when a session that rests keeps its place."""
        if session.last is None:
            return -math.inf
        again = self._recompute(session.own)
        worth = again * (1 + self._running)
        if session.hint is None:
            worth *= self._returning.get(session.party[:2], 1.0)
        else:
            worth = session.hint + again if session.hint <= worth else 0.0
        return max(session.idle_since + min(worth, SESSION_IDLE_SECONDS), session.pinned_until)

    def _wait(self, turn: Turn, now: float) -> None:
        """Pass a request over, and see when to look again."""
        session = turn.session
        if session not in self._waiting:
            self._waiting[session] = now
            if self._observer is not None:
                need = self._footprints.adds(turn.trail)
                shortage = Shortage(need, self._footprints.total, self.budget)
                self._observer.waits(turn.request, shortage)
        if self._looks_again_at == math.inf:
            self._looks_again_at = min(self._times(now), default=math.inf)
        self._looks_again_at = min(self._looks_again_at, now + AGING_SECONDS)

    def _times(self, now: float) -> Iterator[float]:
        """When something may change by itself, all after `now`."""
        times = [since + AGING_SECONDS for since in self._waiting.values()]
        times += [self._keeps_until(each) for each in self._admitted if not each.running]
        times += [each.pinned_until for each in self._admitted]
        return (time for time in (*times, self._aged_at) if time > now)

    def _replace(self, session: Session, request: RequestId) -> None:
        last = session.last
        if not session.turns:
            self._learn(session, came_back=False)
        self._dismiss(session)
        self._replaced += 1
        if self._observer is not None:
            self._observer.replaced(session.party, last, request)

    def _learn(self, session: Session, came_back: bool) -> None:
        """What became of a session that rested, and of which nobody knew what would."""
        if session.hint is None:
            part = self._returning.get(session.party[:2], 1.0)
            self._returning[session.party[:2]] = part + (came_back - part) / RECENT

    def _settle(self, session: Session) -> None:
        """See whether a session keeps its place, and whether it is to be remembered."""
        is_gone = session.last is None or session.hint == math.inf
        if session in self._admitted and not session.running and is_gone:
            self._dismiss(session)
        elif not session.turns and session not in self._admitted:
            self._table.pop(session.party, None)
        if not session.queued:
            self._waiting.pop(session, None)
        self._changed()

    def _dismiss(self, session: Session) -> None:
        """Take a place back, and forget who has no turn queued."""
        del self._admitted[session]
        if session.last is not None:
            self._footprints.remove(session.last)
            session.last = None
        if not session.turns:
            del self._table[session.party]
        self._changed()
