"""An engine without MLX for the scheduler's tests: memory is a set of stored prefixes.

Its clock stands still unless a turn takes `turn_seconds`.
"""

import math
from collections import Counter
from typing import TypeVar

import numpy as np

from mlx_swarm.broker.cache.prefix_hash import Tokens, common_prefix_length
from mlx_swarm.broker.engine.fairness import Party
from mlx_swarm.broker.engine.footprints import Trail
from mlx_swarm.broker.engine.preemption import SLICE
from mlx_swarm.broker.engine.scheduler import Scheduler
from mlx_swarm.broker.engine.sessions import Sessions
from mlx_swarm.broker.engine.work import (
    Admit,
    Decode,
    Expire,
    Hold,
    LanePolicy,
    Part,
    Preempt,
    Prefill,
    Store,
    Wait,
    Work,
)
from mlx_swarm.broker.request import RequestId

WorkType = TypeVar("WorkType")


class FakeLane:
    """Tells the scheduler what it wants to know."""

    exact_stops = False
    preempts = True

    def __init__(self, max_rows: int, chunk: int, donates: bool = False) -> None:
        self.max_rows = max_rows
        self.donates = donates
        self._chunk = chunk

    def chunk(self, decoding: bool) -> int:
        return self._chunk


class FakeEngine:
    """Does what the scheduler says and keeps the books.

    `refuses` is a cache that takes nothing; with `lasting` rows can be stored while they decode.
    Running rows have `room` for so many tokens of prompts together, sessions of agents with a name
    for `budget`; computing a token takes `token_seconds`. `served` counts the tokens computed for
    each party's requests, those computed again left out.
    """

    def __init__(
        self,
        *,
        max_rows: int = 8,
        prefill_chunk: int = 64,
        minimum_shared: int = 1,
        output: int = 2,
        refuses: bool = False,
        lasting: bool = False,
        room: int = 1 << 30,
        turn_seconds: float = 0.0,
        budget: float = math.inf,
        token_seconds: float = 0.0,
        slice_tokens: int = SLICE,
    ) -> None:
        self.now = 0.0
        self.turn_seconds = turn_seconds
        self.sessions = Sessions(budget, lambda: self.now, lambda tokens: tokens * token_seconds)
        self.scheduler = Scheduler(
            self.known,
            max_rows=max_rows,
            clock=lambda: self.now,
            has_memory=self._has_room,
            may_start=self.sessions.may_start,
            minimum_shared=minimum_shared,
            computed=self.held,
            shortage=self._shortage,
            promised=self._need,
            slice_tokens=slice_tokens,
        )
        self.lane = FakeLane(max_rows, prefill_chunk, donates=lasting)
        self.lasting = lasting
        self.output = output
        self.room = room
        self.refuses = refuses
        self.submitted = self.submitted_tokens = 0
        self.prompts: dict[RequestId, tuple[Tokens, str | None]] = {}
        self.positions: dict[RequestId, int] = {}
        self.decoded: Counter[RequestId] = Counter()
        self.outputs: dict[RequestId, int] = {}
        self.asked: dict[RequestId, int] = {}
        self.reached: Counter[RequestId] = Counter()
        self.resumed_at: Counter[RequestId] = Counter()
        self.recomputed = self.preemptions = 0
        self.parties: dict[RequestId, Party] = {}
        self.hints: dict[RequestId, float | None] = {}
        self.lanes: dict[RequestId, FakeLane] = {}
        self.served: Counter[Party] = Counter()
        self.memory: list[tuple[str, Tokens]] = []
        self.alternatives: dict[RequestId, int | None] = {}
        self.with_logprobs: list[tuple[str, Tokens]] = []
        self.computed: Counter[tuple[str | None, bytes]] = Counter()
        self.log: list[Work] = []

    def submit(
        self,
        name: str,
        tokens: list[int],
        *,
        namespace: str | None = "shared",
        boundaries: tuple[int, ...] = (),
        party: Party | None = None,
        priority: int = 0,
        deadline: float | None = None,
        output: int = 0,
        lane: FakeLane | None = None,
        alternatives: int | None = None,
        hint: float | None = None,
    ) -> RequestId:
        request = RequestId(name)
        prompt = np.array(tokens, np.uint32)
        self.prompts[request] = prompt, namespace
        self.asked[request] = len(prompt)
        self.submitted += 1
        self.submitted_tokens += len(tokens)
        self.outputs[request] = output or self.output
        self.parties[request] = party or Party()
        self.hints[request] = hint
        if namespace is not None and self.parties[request].agent:
            trail = Trail.of(namespace, prompt, self.outputs[request])
            self.sessions.arrived(request, self.parties[request], trail, priority)
        self.lanes[request] = lane or self.lane
        self.alternatives[request] = alternatives
        self.scheduler.submit(
            request,
            prompt,
            namespace,
            boundaries,
            max_tokens=self.outputs[request],
            lane=self.lanes[request],
            party=self.parties[request],
            priority=priority,
            deadline=None if deadline is None else self.now + deadline,
            alternatives=alternatives,
        )
        return request

    def known(self, tokens: Tokens, namespace: str, alternatives: int | None = None) -> int:
        memory = self.memory if alternatives is None else self.with_logprobs
        found = (common_prefix_length(tokens, kept) for at, kept in memory if at == namespace)
        longest = max(found, default=0)
        if alternatives is not None:
            longest = 0 if alternatives else max(longest - 1, 0)
        return min(longest, len(tokens) - 1)

    def turn(self) -> Work | None:
        """One piece of work, done."""
        self.now += self.turn_seconds
        if self.sessions.is_due():
            self.scheduler.memory_changed()
        work = self.scheduler.next()
        if work is not None:
            self.log.append(work)
        # No piece of work is done for nothing, so there is an end to it.
        outputs = sum(self.outputs.values())
        again = 20 * self.preemptions + 4 * self.recomputed
        assert len(self.log) <= 4 * self.submitted_tokens + 20 * self.submitted + outputs + again
        match work:
            case Admit(request):
                self.sessions.started(request)
                self.admit(request)
            case Prefill(parts):
                for part in parts:
                    self._prefill(*part)
            case Store(request):
                self.keep(request)
                self.scheduler.stored(request, kept=not self.refuses)
            case Decode(lane):
                self._decode(lane)
            case Preempt(request):
                self.preempt(request)
            case Expire(request):
                self.cancel(request)
            case Wait() | Hold() | None:
                pass
        self.check_integrity()
        return work

    def drain(self) -> None:
        """Run until nothing is left to do."""
        while self.turn() is not None:
            pass
        assert not self.prompts, f"left behind: {list(self.prompts)}"

    def admit(self, request: RequestId) -> None:
        """Give a request a row and what memory has of its prompt."""
        prompt, namespace = self.prompts[request]
        alternatives = self.alternatives[request]
        found = self.known(prompt, namespace, alternatives) if namespace else 0
        self.positions[request] = found
        self.scheduler.admitted(request, self.positions[request])

    def preempt(self, request: RequestId) -> None:
        """Take a request that runs from its row; what it computed is kept."""
        self.preemptions += 1
        self.keep(request)
        sequence, namespace = self.held(request), self.prompts[request][1]
        position = self.positions.pop(request)
        self.reached[request] = max(self.reached[request], position)
        if self.decoded[request]:
            self.reached[request] = self.asked[request] + self.decoded[request] - 1
        if self.decoded[request] > self.resumed_at[request]:
            self.prompts[request] = sequence, namespace
            self.resumed_at[request] = self.decoded[request]
        self.scheduler.preempted(request, self.prompts[request][0])
        self.scheduler.check_integrity()

    def cancel(self, request: RequestId) -> None:
        """End a request; what it computed is kept."""
        self.keep(request)
        held, namespace = self.held(request), self.prompts[request][1]
        is_kept = namespace is not None and len(held) and not self.refuses
        self._end(request, Trail.of(namespace, held, 0) if namespace and is_kept else None)

    def fail(self, request: RequestId) -> None:
        """End a request; what it computed is lost."""
        self._end(request, None)

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()
        self.sessions.check_integrity()

    def keep(self, request: RequestId) -> None:
        prompt, namespace = self.prompts[request]
        if namespace is not None and not self.refuses:
            self.memory.append((namespace, self.held(request)))
            if self.alternatives[request] is not None:
                self.with_logprobs.append((namespace, self.held(request)[: len(prompt)]))

    def held(self, request: RequestId) -> Tokens:
        """Everything that a row has computed: of its prompt, then what it has answered."""
        prompt, position = self.prompts[request][0], self.positions.get(request, 0)
        first, last = self.resumed_at[request], self.decoded[request]
        if first == last:
            return prompt[:position]
        answered = 1_000_000 + np.arange(first, last, dtype=np.uint32)
        return np.concatenate([prompt, answered])

    @property
    def parts(self) -> list[Part]:
        """All parts of prompts so far."""
        return [part for work in self.works(Prefill) for part in work.parts]

    def works(self, kind: type[WorkType]) -> list[WorkType]:
        """All work of one kind so far."""
        return [work for work in self.log if isinstance(work, kind)]

    def _end(self, request: RequestId, kept: Trail | None) -> None:
        self.sessions.ended(request, kept, self.decoded[request], self.hints[request])
        del self.prompts[request]
        self.positions.pop(request, None)
        self.scheduler.ended(request)
        self.check_integrity()

    def _need(self, request: RequestId) -> int:
        return self.asked[request]

    def _used(self) -> int:
        return sum(map(self._need, self.positions))

    def _has_room(self, request: RequestId) -> bool:
        return not self.positions or self._used() + self._need(request) <= self.room

    def _shortage(self, request: RequestId) -> float:
        return max(0, self._used() + self._need(request) - self.room)

    def _prefill(self, request: RequestId, start: int, stop: int) -> None:
        prompt, namespace = self.prompts[request]
        assert start == self.positions[request] < stop < len(prompt)
        known = max(start, min(stop, self.reached[request]))
        self.recomputed += known - start
        self.served[self.parties[request]] += stop - known
        for end in range(known + 1, stop + 1):
            self.computed[namespace, prompt[:end].tobytes()] += 1
        self.positions[request] = stop
        self.scheduler.prefilled(request, stop, lasting=self.lasting)

    def _decode(self, lane: LanePolicy) -> None:
        running = [
            r
            for r, at in self.positions.items()
            if at == len(self.prompts[r][0]) - 1 and self.lanes[r] is lane
        ]
        assert running
        for request in running:
            self.decoded[request] += 1
            self.served[self.parties[request]] += 1
            if self.decoded[request] == self.outputs[request]:
                (self.cancel if self.lasting else self.fail)(request)
