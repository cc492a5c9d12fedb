"""What the engine does next: policy only, no MLX, no clock of its own, deterministic.

Requests are admitted in their turn (`fairness`), up to `max_rows` at a time, and computed in turn
(`turns`). A request past its deadline ends, whatever its state. A row may have to give its place to
another request, and is queued again (`preemption`).

Single-flight: a request waits while a request that is being prefilled (its *leader*) will store a
longer prefix of its prompt than memory holds. The leader stops exactly where the two part and
stores there. Leaders never wait themselves, so nobody waits in a circle; a leader that is cancelled
or fails frees its followers, of which one becomes the next leader. A row that decodes leads as
well, with all that it has computed: it stores once somebody has a use for that, or at its end.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from msgspec import Struct

from ..cache.prefix_hash import Tokens
from ..request import RequestId
from ..trace.events import PreemptionReason
from .deadlines import Deadlines
from .entry import Entry, State
from .fairness import Account, Clock, FairQueue, Party, roughly
from .leaders import MINIMUM_SHARED_TOKENS, Known, Leaders
from .preemption import LOOKS, SLICE, Lack, expendable, may_go, reason_for, victims
from .turns import Turns
from .work import (
    Admit,
    Decode,
    Expire,
    Hold,
    LanePolicy,
    Preempt,
    Store,
    Wait,
    Work,
)

LOOKAHEAD = 2
"""How much of the queue may choose a leader while there is no room, in multiples of `max_rows`."""

NOBODY = Party()


class SchedulerStatistics(Struct, frozen=True, kw_only=True):
    """Requests by state, and how often one that ran was `preempted` so far."""

    queued: int
    waiting: int
    restoring: int
    prefilling: int
    decoding: int
    preempted: int = 0


class Standing(NamedTuple):
    """Why it is a request's turn: what its tenant, swarm and agent have attained, each in tokens
    on the scale of its kind, and how many requests are queued besides.
    """

    tenant: float
    swarm: float
    agent: float
    queued: int


class Scheduler:
    """Decides on the next piece of work; told what became of it.

    `known` is how many tokens of a prompt memory has now. `has_memory(request)` says whether a
    request may run now, and keeps memory for it until it is asked for another one. If not, it stays
    the next of its priority and those behind it wait as well, so that nobody is overtaken for ever.
    `clock` is what deadlines and aging go by. `computed(request)` are the tokens that a decoding
    row of a lane that donates could store. `may_start(request)` is asked before: who may not is
    passed over, and nobody waits for it. `shortage(request)` are the bytes that it lacks then,
    infinite if no row can help it, and `promised(request)` those that a row would give back. A row
    has its place for `slice_tokens` before others of its priority get it.
    """

    def __init__(
        self,
        known: Known,
        *,
        max_rows: int,
        clock: Clock,
        computed: Callable[[RequestId], Tokens],
        minimum_shared: int = MINIMUM_SHARED_TOKENS,
        has_memory: Callable[[RequestId], bool] = lambda request: True,
        may_start: Callable[[RequestId], bool] = lambda request: True,
        shortage: Callable[[RequestId], float] = lambda request: 0.0,
        promised: Callable[[RequestId], int] = lambda request: 0,
        slice_tokens: int = SLICE,
    ) -> None:
        self._has_memory = has_memory
        self._may_start = may_start
        self._shortage = shortage
        self._promised = promised
        self._slice = slice_tokens
        self._max_rows = max_rows
        self._clock = clock
        self._entries: dict[RequestId, Entry] = {}
        self._accounts = Account()
        self._deadlines = Deadlines()
        self._pending: FairQueue[Entry] = FairQueue(clock)
        self._prefilling: FairQueue[Entry] = FairQueue(clock, roughly)
        # In order of admission: dicts for their cheap removal.
        self._restoring: dict[Entry, None] = {}
        self._decoding: dict[Entry, None] = {}
        self._due: dict[Entry, None] = {}
        minimum = max(minimum_shared, 1)
        self._turns = Turns(self._prefilling, self._decoding, minimum - 1)
        self._leaders = Leaders(known, computed, minimum, LOOKAHEAD * max_rows)
        self._undecided = False
        # What is left of going through the queue; begun anew whenever it may turn out differently.
        self._to_decide: Iterator[Entry] = iter(())
        self._admits = False
        # Who is to get the places of whom, and why; when that is looked at again.
        self._leaving: list[tuple[Entry, Entry, PreemptionReason]] = []
        self._may_preempt = False
        self._computed_since = 0.0
        self._admissions = self._preemptions = 0

    def submit(
        self,
        request: RequestId,
        tokens: Tokens,
        namespace: str | None,
        boundaries: Iterable[int] = (),
        *,
        max_tokens: int,
        lane: LanePolicy,
        party: Party = NOBODY,
        priority: int = 0,
        deadline: float | None = None,
        alternatives: int | None = None,
    ) -> None:
        """Queue a request for up to `max_tokens` new tokens. Without a namespace it neither shares
        nor stores; `deadline` is on the clock. With `alternatives` the log-probabilities of its
        prompt are needed, and that many of the likeliest tokens with each: it follows only who
        computes the same, and with alternatives, which nobody stores, nobody.
        """
        marks = boundaries if namespace is not None else ()
        account = self._accounts.agent(party)
        entry = Entry(
            request, tokens, namespace, marks, account, priority, max_tokens, lane, alternatives
        )
        self._entries[request] = entry
        if deadline is not None:
            self._deadlines.add(request, deadline)
        self._enqueue(entry)

    def next(self) -> Work | None:
        """The next piece of work, or None until something is submitted or a deadline is over."""
        return (
            self._expired()
            or self._leave()
            or self._decide()
            or self._preempt()
            or self._due_store()
            or self._compute()
        )

    @property
    def queued(self) -> int:
        """How many requests have no row yet."""
        return len(self._pending)

    def next_deadline(self) -> float | None:
        """The next deadline of an open request, on the clock."""
        deadline = self._deadlines.next()
        return deadline and deadline[0]

    def standing(self, request: RequestId) -> Standing:
        """Where a request stands that is next."""
        _, tenant, swarm, agent = self._entries[request].account.path
        queued = len(self._pending) - 1
        return Standing(tenant.attained, swarm.attained, agent.attained, queued)

    def admitted(self, request: RequestId, position: int, stops: Iterable[int] = ()) -> bool:
        """The request has `position` tokens of its prompt from memory and a row to run in.

        `stops` are more lengths at which it is to store. Whether it decodes from now on.
        """
        entry = self._entries[request]
        entry.boundaries |= frozenset(stops)
        self._leave_queue(entry)
        self._restoring.pop(entry, None)
        entry.position = entry.stored = position
        entry.lost = max(0, entry.reached - position)
        entry.state = State.PREFILLING
        self._prefilling.add(entry)
        self._leaders.add(entry)
        self._reconsider()
        return self._finish_prefill(entry)

    def restoring(self, request: RequestId) -> None:
        """Instead of `admitted`: the request has a row, and waits for the tier below memory."""
        entry = self._entries[request]
        self._leave_queue(entry)
        entry.state = State.RESTORING
        self._restoring[entry] = None
        self._reconsider()

    def restored(self, request: RequestId) -> None:
        """What the request waited for is in memory, or never will be: it is first in the queue."""
        entry = self._entries[request]
        del self._restoring[entry]
        entry.state = State.QUEUED
        self._enqueue(entry, front=True)
        self.memory_changed()

    def preempted(self, request: RequestId, tokens: Tokens) -> None:
        """The request has given up its row; `tokens` are its prompt and its output so far. It is
        queued again, the first of its agent's, and goes on when its turn comes.
        """
        entry = self._entries[request]
        is_decoding = entry.state is State.DECODING
        self._free_followers(entry)
        self._prefilling.discard(entry)
        for place in (self._decoding, self._due):
            place.pop(entry, None)
        entry.stop()
        entry.priority = entry.asked_priority
        entry.tokens, entry.end = tokens, len(tokens) - 1
        entry.reached = entry.end if is_decoding else max(entry.reached, entry.position)
        entry.position = entry.stored = 0
        entry.waits = entry.is_guarded = True
        entry.state = State.QUEUED
        self._leaders.tokens_changed(entry, self._entries.values())
        self._preemptions += 1
        entry.account.requeue()
        self._pending.add(entry, back=True)
        self.memory_changed()

    def expendable(self) -> list[RequestId]:
        """The rows to preempt where memory runs short, the first ones first; one stays."""
        return [entry.request for entry in expendable(self._runners())]

    def prefilled(self, request: RequestId, position: int, *, lasting: bool = False) -> bool:
        """The request's prompt is computed up to `position`. Whether it decodes from now on.

        With `lasting` its KV stays where it can be stored from at any later time: then nothing is
        stored at the end of the prompt unless somebody asked for it.
        """
        entry = self._entries[request]
        self._turns.computed(entry, position - entry.position)
        self._charge(entry, position)
        at_stop = position == self._turns.next_stop(entry)
        entry.position = position
        wanted = not lasting or entry.wanted_tokens() > entry.stored
        if at_stop and wanted and entry.namespace is not None:
            self._due[entry] = None
        return self._finish_prefill(entry)

    def stored(self, request: RequestId, *, kept: bool) -> bool:
        """All that the request has computed was put; if it was not `kept`, those who waited for it
        wait for nobody any more. Whether it decodes from now on, and did not before.
        """
        entry = self._entries[request]
        for follower in entry.followers:
            follower.waits = kept
        self._due.pop(entry, None)
        self.memory_changed()
        if entry.state is State.DECODING:
            entry.stored = max(entry.stored, *entry.followers.values(), 0)
            self._free_followers(entry)
            return False
        entry.stored = entry.position
        return self._finish_prefill(entry)

    def ended(self, request: RequestId) -> None:
        """The request is over, in whatever state it was."""
        entry = self._entries.pop(request)
        self._unfollow(entry)
        self._free_followers(entry)
        if entry in self._pending:
            self._pending.discard(entry)
            entry.account.leave_queue()
        self._prefilling.discard(entry)
        for place in (self._restoring, self._decoding, self._due):
            place.pop(entry, None)
        self._leaders.discard(entry)
        entry.close()
        self._deadlines.discard(request)
        self.memory_changed()

    def memory_changed(self) -> None:
        """There may be more memory now, or more in it: who waits is looked at again."""
        self._leaders.memory_changed()
        self._reconsider()

    def statistics(self) -> SchedulerStatistics:
        """How many requests are in which state."""
        states = [entry.state for entry in self._entries.values()]
        return SchedulerStatistics(
            queued=states.count(State.QUEUED),
            waiting=states.count(State.WAITING),
            restoring=states.count(State.RESTORING),
            prefilling=states.count(State.PREFILLING),
            decoding=states.count(State.DECODING),
            preempted=self._preemptions,
        )

    def check_integrity(self) -> None:
        """Assert what must always hold."""
        counts = self.statistics()
        assert counts.queued + counts.waiting == len(self._pending)
        assert counts.restoring == len(self._restoring)
        assert counts.prefilling == len(self._prefilling)
        assert counts.decoding == len(self._decoding)
        assert self._occupied() <= self._max_rows
        assert self._due.keys() <= self._prefilling.claims.keys() | self._decoding.keys()
        self._pending.check_integrity()
        self._prefilling.check_integrity()
        self._accounts.check_integrity()
        assert self._accounts.open == len(self._entries)
        assert self._entries or not self._accounts.size()
        assert self._accounts.queued == len(self._pending)
        assert len(self._deadlines) <= len(self._entries)
        for entry in self._entries.values():
            assert 0 <= entry.position <= entry.end
            assert entry.stored <= entry.position or entry.state is State.DECODING
            assert (entry.leader is not None) == (entry.state is State.WAITING)
            running = State.PREFILLING, State.DECODING
            assert entry.leader is None or entry.leader.state in running
            assert all(follower.leader is entry for follower in entry.followers)

    def _expired(self) -> Work | None:
        deadline = self._deadlines.next()
        if deadline is None or deadline[0] > self._clock():
            return None
        return Expire(deadline[1])

    def _decide(self) -> Work | None:
        """Who leaves the queue, and who waits for whom."""
        if self._undecided:
            self._admits = self._occupied() < self._max_rows
            # Nobody is admitted without room, and who is far from admission can decide later: else
            # a long queue would be gone through at every change.
            near = None if self._admits else LOOKAHEAD * self._max_rows
            self._to_decide, self._undecided = islice(self._pending.in_turn(), near), False
        for entry in self._to_decide:
            leader, shared, worth = self._leaders.best_for(
                entry, self._prefilling.claims, self._decoding
            )
            if leader is not None and worth and entry.waits:
                if (entry.leader, leader.followers.get(entry)) != (leader, shared):
                    self._follow(entry, leader, shared)
                    return Wait(entry.request, leader.request, shared)
            elif self._admits and (self._is_full(entry.lane) or not self._may_start(entry.request)):
                self._unfollow(entry)
            elif self._admits and self._has_memory(entry.request):
                self._undecided = True
                return Admit(entry.request, leader is not None)
            else:
                is_short, self._admits = self._admits, False
                self._unfollow(entry)
                if is_short and self._pending.hold(entry):
                    return Hold(entry.request, len(self._pending) - 1)
        return None

    def _leave(self) -> Work | None:
        """The next row that gives its place to another request."""
        while self._leaving:
            entry, waiter, reason = self._leaving.pop(0)
            is_running = entry in self._prefilling or entry in self._decoding
            if is_running and waiter in self._pending:
                return Preempt(entry.request, waiter.request, reason)
        return None

    def _preempt(self) -> Work | None:
        """Somebody else's place for who is next and lacks one, if that is due."""
        if not self._may_preempt and self._computed_since < self._slice / LOOKS:
            return None
        self._may_preempt, self._computed_since = False, 0.0
        highest = self._pending.highest
        rows = self._runners()
        if highest is None or not any(may_go(row, highest, self._slice) for row in rows):
            return None
        seen: set[tuple[int, LanePolicy]] = set()
        for entry in list(islice(self._pending.in_turn(), LOOKAHEAD * self._max_rows)):
            key = entry.priority, entry.lane
            if entry.leader is not None or key in seen or not self._may_start(entry.request):
                continue
            seen.add(key)
            if leaving := self._victims(entry, rows):
                self._leaving = [(row, entry, self._reason(entry, row)) for row in leaving]
                # Whatever happens meanwhile, these places are for it.
                self._pending.advance(entry)
                self._undecided = True
                return self._leave()
        return None

    def _victims(self, entry: Entry, rows: list[Entry]) -> list[Entry]:
        is_full = self._is_full(entry.lane)
        if is_full:
            rows = [row for row in rows if row.lane is entry.lane]
        if not any(reason_for(entry, row, self._slice) for row in rows):
            return []
        lacks_row = is_full or self._occupied() >= self._max_rows
        # Memory is only taken by whom a place is found for.
        has_memory = lacks_row and self._has_memory(entry.request)
        nbytes = 0.0 if has_memory else self._shortage(entry.request)
        if not nbytes and not has_memory:  # what it lacks is on its way, or pinned
            return []
        lack = Lack(lacks_row, nbytes)
        return victims(entry, rows, lack, lambda row: self._promised(row.request), self._slice)

    def _reason(self, entry: Entry, row: Entry) -> PreemptionReason:
        reason = reason_for(entry, row, self._slice)
        assert reason is not None
        return reason

    def _runners(self) -> list[Entry]:
        """The rows that may be interrupted."""
        running = (*self._prefilling.claims, *self._decoding)
        return [entry for entry in running if entry.lane.preempts]

    def _due_store(self) -> Work | None:
        entry = next(iter(self._due), None)
        return Store(entry.request, entry.wanted_tokens()) if entry is not None else None

    def _compute(self) -> Work | None:
        work = self._turns.next()
        self._computed_since += isinstance(work, Decode)
        return work

    def _is_full(self, lane: LanePolicy) -> bool:
        if lane.max_rows >= self._max_rows:
            return False
        places = (self._restoring, self._prefilling.claims, self._decoding)
        rows = sum(entry.lane is lane for place in places for entry in place)
        return rows >= lane.max_rows

    def _reconsider(self) -> None:
        self._undecided = self._may_preempt = True

    def _occupied(self) -> int:
        return len(self._restoring) + len(self._prefilling) + len(self._decoding)

    def _enqueue(self, entry: Entry, *, front: bool = False) -> None:
        entry.account.queue()
        self._pending.add(entry, front=front)
        self._reconsider()

    def _leave_queue(self, entry: Entry) -> None:
        """Leave for a row."""
        self._unfollow(entry)
        if entry in self._pending:
            self._pending.served(entry)
            self._pending.discard(entry)
            entry.account.leave_queue()
            entry.start()
            self._admissions += 1
            entry.number, entry.fresh = self._admissions, 0.0
            highest = self._pending.highest
            entry.is_guarded |= highest is not None and highest > entry.priority

    def _charge(self, entry: Entry, position: int) -> None:
        """Prompt tokens up to `position` were computed. What several wait for they pay together."""
        payers = [each for each, shared in entry.followers.items() if shared >= position]
        self._computed_since += position - entry.position
        # What is computed again is nobody's gain.
        fresh = max(0, position - max(entry.position, entry.reached))
        entry.fresh += fresh
        share = fresh / (1 + len(payers))
        entry.compute(share)
        for payer in payers:
            payer.account.charge(share)
        self._prefilling.served(entry)

    def _follow(self, entry: Entry, leader: Entry, shared: int) -> None:
        self._unfollow(entry)
        entry.leader, entry.state = leader, State.WAITING
        leader.followers[entry] = shared
        self._prefilling.raise_to(leader, entry.priority)
        # A leader that is past the parting point has it already and only has to store it.
        if leader.state is State.DECODING or shared <= leader.position:
            self._due[leader] = None

    def _unfollow(self, entry: Entry) -> None:
        if entry.leader is not None:
            entry.leader.followers.pop(entry, None)
            entry.leader, entry.state = None, State.QUEUED

    def _free_followers(self, entry: Entry) -> None:
        for follower in list(entry.followers):
            self._unfollow(follower)

    def _finish_prefill(self, entry: Entry) -> bool:
        """Let a row decode once its prompt is computed and what is wanted of it is stored."""
        if entry.position < entry.end or entry in self._due:
            return False
        entry.state = State.DECODING
        self._prefilling.discard(entry)
        self._decoding[entry] = None
        self._free_followers(entry)
        self._reconsider()
        return True
