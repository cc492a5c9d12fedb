"""What the engine does next: policy only, no MLX, no clock of its own, deterministic.

Requests are admitted in their turn (`fairness`), up to `max_rows` at a time. Prefill goes by
chunks, in turn as well, short rests of several prompts in one; a decode step of all running rows
comes after every chunk of prompt tokens at the latest. A request past its deadline ends, whatever
its state.

Single-flight: a request waits while a request that is being prefilled (its *leader*) will store a
longer prefix of its prompt than memory holds. The leader stops exactly where the two part and
stores there. Leaders never wait themselves, so nobody waits in a circle; a leader that is cancelled
or fails frees its followers, of which one becomes the next leader. A row that decodes leads as
well, with all that it has computed: it stores once somebody has a use for that, or at its end.
"""

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from itertools import count, islice
from typing import NamedTuple

from msgspec import Struct

from ..cache.prefix_hash import Tokens, common_prefix_length
from ..request import RequestId
from .deadlines import Deadlines
from .fairness import Account, Claim, Clock, FairQueue, Party, roughly
from .work import Admit, Decode, Expire, Hold, Part, Prefill, Store, Wait, Work

MINIMUM_SHARED_TOKENS = 16
"""A request does not wait for fewer tokens than this."""

LOOKAHEAD = 2
"""How much of the queue may choose a leader while there is no room, in multiples of `max_rows`."""

NOBODY = Party()


class SchedulerStatistics(Struct, frozen=True, kw_only=True):
    """Requests by state."""

    queued: int
    waiting: int
    restoring: int
    prefilling: int
    decoding: int


class Standing(NamedTuple):
    """Why it is a request's turn: what its tenant, swarm and agent have attained, each in tokens
    on the scale of its kind, and how many requests are queued besides.
    """

    tenant: float
    swarm: float
    agent: float
    queued: int


class _State(Enum):
    QUEUED = "queued"
    WAITING = "waiting"
    RESTORING = "restoring"
    PREFILLING = "prefilling"
    DECODING = "decoding"


class _Entry(Claim):
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
    ) -> None:
        super().__init__(account, priority, len(tokens) + max_tokens)
        self.request = request
        self.tokens = tokens
        self.namespace = namespace
        self.end = len(tokens) - 1
        self.boundaries = frozenset(boundaries)
        self.state = _State.QUEUED
        self.position = 0
        self.stored = 0
        self.waits = True
        self.leader: _Entry | None = None
        self.followers: dict[_Entry, int] = {}
        self.common: dict[RequestId, int] = {}
        self.hopes: dict[_Entry, int] = {}
        self.met = 0
        self.in_memory = 0
        self.looked_up_at = -1

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
        is_whole = self.state is _State.DECODING
        stops += [at for at in self.followers.values() if is_whole or at <= self.position]
        return max(stops, default=0)


class Scheduler:
    """Decides on the next piece of work; told what became of it.

    `known(tokens, namespace)` is how many tokens of a prompt memory has now. `has_memory(request)`
    says whether a request may run now. If not, it stays the next of its priority and those behind
    it wait as well, so that nobody is overtaken for ever. `clock` is what deadlines and aging go
    by. With `exact_stops` (models whose state serves one length only) no stop is left out for
    a later one nearby. `computed(request)` are the tokens that a decoding row could store, none by
    default. `chunk(decoding)` is how many prompt tokens to compute at once: while rows decode, that
    is between two steps.
    """

    def __init__(
        self,
        known: Callable[[Tokens, str], int],
        *,
        max_rows: int,
        chunk: Callable[[bool], int],
        clock: Clock,
        minimum_shared: int = MINIMUM_SHARED_TOKENS,
        exact_stops: bool = False,
        has_memory: Callable[[RequestId], bool] = lambda request: True,
        computed: Callable[[RequestId], Tokens] | None = None,
    ) -> None:
        self._known = known
        self._has_memory = has_memory
        self._max_rows = max_rows
        self._chunk = chunk
        self._computed = computed
        self._minimum_shared = max(minimum_shared, 1)
        self._reach = 0 if exact_stops else self._minimum_shared - 1
        self._clock = clock
        self._entries: dict[RequestId, _Entry] = {}
        self._accounts = Account()
        self._deadlines = Deadlines()
        self._pending: FairQueue[_Entry] = FairQueue(clock)
        self._prefilling: FairQueue[_Entry] = FairQueue(clock, roughly)
        # In order of admission: dicts for their cheap removal.
        self._restoring: dict[_Entry, None] = {}
        self._decoding: dict[_Entry, None] = {}
        self._due: dict[_Entry, None] = {}
        # Who computes, numbered in order of admission.
        self._leaders: dict[_Entry, int] = {}
        self._numbers = count(1)
        self._since_decode = 0
        self._undecided = False
        # What is left of going through the queue; begun anew whenever it may turn out differently.
        self._to_decide: Iterator[_Entry] = iter(())
        self._admits = False
        self._memory_version = 0

    def submit(
        self,
        request: RequestId,
        tokens: Tokens,
        namespace: str | None,
        boundaries: Iterable[int] = (),
        *,
        max_tokens: int,
        party: Party = NOBODY,
        priority: int = 0,
        deadline: float | None = None,
    ) -> None:
        """Queue a request for up to `max_tokens` new tokens. Without a namespace it neither shares
        nor stores; `deadline` is on the clock.
        """
        marks = boundaries if namespace is not None else ()
        account = self._accounts.agent(party)
        entry = _Entry(request, tokens, namespace, marks, account, priority, max_tokens)
        self._entries[request] = entry
        if deadline is not None:
            self._deadlines.add(request, deadline)
        self._enqueue(entry)

    def next(self) -> Work | None:
        """The next piece of work, or None until something is submitted or a deadline is over."""
        return self._expired() or self._decide() or self._due_store() or self._compute()

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
        entry.state = _State.PREFILLING
        self._prefilling.add(entry)
        self._leaders.pop(entry, None)
        self._leaders[entry] = next(self._numbers)
        self._undecided = True
        return self._finish_prefill(entry)

    def restoring(self, request: RequestId) -> None:
        """Instead of `admitted`: the request has a row, and waits for the tier below memory."""
        entry = self._entries[request]
        self._leave_queue(entry)
        entry.state = _State.RESTORING
        self._restoring[entry] = None
        self._undecided = True

    def restored(self, request: RequestId) -> None:
        """What the request waited for is in memory, or never will be: it is first in the queue."""
        entry = self._entries[request]
        del self._restoring[entry]
        entry.state = _State.QUEUED
        self._enqueue(entry, front=True)
        self.memory_changed()

    def prefilled(self, request: RequestId, position: int, *, lasting: bool = False) -> bool:
        """The request's prompt is computed up to `position`. Whether it decodes from now on.

        With `lasting` its KV stays where it can be stored from at any later time: then nothing is
        stored at the end of the prompt unless somebody asked for it.
        """
        entry = self._entries[request]
        self._since_decode += position - entry.position
        self._charge(entry, position)
        at_stop = position == entry.next_stop(self._reach)
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
        if entry.state is _State.DECODING:
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
        for place in (self._restoring, self._decoding, self._due, self._leaders):
            place.pop(entry, None)
        entry.close()
        self._deadlines.discard(request)
        self.memory_changed()

    def memory_changed(self) -> None:
        """There may be more memory now, or more in it: who waits is looked at again."""
        self._memory_version += 1
        self._undecided = True

    def statistics(self) -> SchedulerStatistics:
        """How many requests are in which state."""
        states = [entry.state for entry in self._entries.values()]
        return SchedulerStatistics(
            queued=states.count(_State.QUEUED),
            waiting=states.count(_State.WAITING),
            restoring=states.count(_State.RESTORING),
            prefilling=states.count(_State.PREFILLING),
            decoding=states.count(_State.DECODING),
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
            assert entry.stored <= entry.position or entry.state is _State.DECODING
            assert (entry.leader is not None) == (entry.state is _State.WAITING)
            running = _State.PREFILLING, _State.DECODING
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
            leader, shared, worth = self._leader_of(entry)
            if leader is not None and worth and entry.waits:
                if (entry.leader, leader.followers.get(entry)) != (leader, shared):
                    self._follow(entry, leader, shared)
                    return Wait(entry.request, leader.request, shared)
            elif self._admits and self._has_memory(entry.request):
                self._undecided = True
                return Admit(entry.request, leader is not None)
            else:
                is_short, self._admits = self._admits, False
                self._unfollow(entry)
                if is_short and self._pending.hold(entry):
                    return Hold(entry.request, len(self._pending) - 1)
        return None

    def _due_store(self) -> Work | None:
        entry = next(iter(self._due), None)
        return Store(entry.request, entry.wanted_tokens()) if entry is not None else None

    def _compute(self) -> Work | None:
        chunk = self._chunk(bool(self._decoding))
        spent = self._since_decode if self._decoding else 0
        parts: list[Part] = []
        for entry in self._prefilling.in_turn():
            stop = entry.next_stop(self._reach)
            if stop - entry.position > chunk:
                # At multiples of the chunk, and not for what is left over of another: every length
                # that was not seen before is dear on GPUs.
                stop = (entry.position // chunk + 1) * chunk
            if spent and spent + stop - entry.position > chunk:
                break
            parts.append(Part(entry.request, entry.position, stop))
            spent += stop - entry.position
        if parts:
            return Prefill(tuple(parts))
        if not self._decoding:
            return None
        self._since_decode = 0
        for entry in self._decoding:
            entry.compute(1)
        return Decode()

    def _occupied(self) -> int:
        return len(self._restoring) + len(self._prefilling) + len(self._decoding)

    def _enqueue(self, entry: _Entry, *, front: bool = False) -> None:
        entry.account.queue()
        self._pending.add(entry, front=front)
        self._undecided = True

    def _leave_queue(self, entry: _Entry) -> None:
        """Leave for a row."""
        self._unfollow(entry)
        if entry in self._pending:
            self._pending.served(entry)
            self._pending.discard(entry)
            entry.account.leave_queue()
            entry.start()

    def _charge(self, entry: _Entry, position: int) -> None:
        """Prompt tokens up to `position` were computed. What several wait for they pay together."""
        payers = [each for each, shared in entry.followers.items() if shared >= position]
        share = (position - entry.position) / (1 + len(payers))
        entry.compute(share)
        for payer in payers:
            payer.account.charge(share)
        self._prefilling.served(entry)

    def _leader_of(self, entry: _Entry) -> tuple[_Entry | None, int, bool]:
        """Who will store most of this prompt, how much, and whether that is worth waiting for."""
        best, longest = None, self._in_memory(entry)
        floor = longest
        if self._hope(entry) <= floor:
            return None, floor, False
        for leader in (*self._prefilling.claims, *(self._decoding if self._computed else ())):
            if entry.hopes.get(leader, 0) <= longest:
                continue
            shared = self._shared(entry, leader)
            if shared > max(longest, leader.stored):
                best, longest = leader, shared
        return best, longest, longest - floor >= self._minimum_shared

    def _hope(self, entry: _Entry) -> int:
        """No leader can ever store more of a prompt than so many tokens.

        With a full queue many prompts are looked at for every change, and hardly one has a leader:
        so each is compared with a leader once, when that is new.
        """
        hopes = entry.hopes
        for leader, number in reversed(self._leaders.items()):
            if number <= entry.met:
                break
            common = self._common(entry, leader)
            hopes[leader] = entry.end if common == len(leader.tokens) else min(common, entry.end)
        entry.met = next(reversed(self._leaders.values()), 0)
        most = max(hopes.values(), default=0)
        if most > entry.in_memory or len(hopes) > 2 * self._max_rows:
            for ended in hopes.keys() - self._leaders.keys():
                del hopes[ended]
            most = max(hopes.values(), default=0)
        return most

    def _common(self, entry: _Entry, leader: _Entry) -> int:
        """Tokens with which both prompts begin; 0 also where they are stored already."""
        if entry.namespace is None or entry.namespace != leader.namespace:
            return 0
        common = entry.common.get(leader.request)
        if common is None:
            # Most part right where the stored prefix ends: one token tells.
            at = leader.stored
            if at < len(leader.tokens) and entry.tokens[min(at, entry.end)] != leader.tokens[at]:
                return 0
            common = common_prefix_length(entry.tokens, leader.tokens)
            entry.common[leader.request] = common
        return common

    def _shared(self, entry: _Entry, leader: _Entry) -> int:
        """Tokens of the prompt that the leader can store for it."""
        common = self._common(entry, leader)
        if leader.state is not _State.DECODING:
            return min(common, entry.end, leader.end)
        if common == len(leader.tokens) and self._computed is not None:
            common = common_prefix_length(entry.tokens, self._computed(leader.request))
        return min(common, entry.end)

    def _in_memory(self, entry: _Entry) -> int:
        if entry.namespace is None:
            return 0
        if entry.looked_up_at != self._memory_version:
            entry.in_memory = self._known(entry.tokens, entry.namespace)
            entry.looked_up_at = self._memory_version
        return entry.in_memory

    def _follow(self, entry: _Entry, leader: _Entry, shared: int) -> None:
        self._unfollow(entry)
        entry.leader, entry.state = leader, _State.WAITING
        leader.followers[entry] = shared
        self._prefilling.raise_to(leader, entry.priority)
        # A leader that is past the parting point has it already and only has to store it.
        if leader.state is _State.DECODING or shared <= leader.position:
            self._due[leader] = None

    def _unfollow(self, entry: _Entry) -> None:
        if entry.leader is not None:
            entry.leader.followers.pop(entry, None)
            entry.leader, entry.state = None, _State.QUEUED

    def _free_followers(self, entry: _Entry) -> None:
        for follower in list(entry.followers):
            self._unfollow(follower)

    def _finish_prefill(self, entry: _Entry) -> bool:
        """Let a row decode once its prompt is computed and what is wanted of it is stored."""
        if entry.position < entry.end or entry in self._due:
            return False
        entry.state = _State.DECODING
        self._prefilling.discard(entry)
        self._decoding[entry] = None
        self._free_followers(entry)
        self._undecided = True
        return True
