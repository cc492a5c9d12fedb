"""Sessions in the engine: measures working sets, tells the cache, the trace and the policy."""

import logging
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from ..cache.prefix_hash import Tokens
from ..cache.prompt_cache import PromptCache
from ..errors import CacheError
from ..request import RequestId
from ..trace import events
from ..trace.recorder import Recorder
from .fairness import Party
from .footprints import Trail
from .row import Row
from .session import SessionsStatistics, Shortage
from .sessions import Sessions

_log = logging.getLogger(__name__)

SHARE = 7 / 8
"""What working sets may take of the prompt cache; the rest is for requests without an agent, for
what nobody needs and is about to leave, and for slack."""

PINNED_FOR = 2
"""A pin ends by itself after so many times the seconds that it was meant for."""


class _Pin(NamedTuple):
    """What is pinned for an agent, and until when at most."""

    namespace: str
    tokens: Tokens
    until: float


class SessionKeeper:
    """Knows which rows are turns of sessions. `rate()` is how many tokens are computed in a second,
    0 if nobody knows yet; `on_change` is called when somebody may start now who could not before.
    """

    def __init__(
        self,
        cache: PromptCache,
        recorder: Recorder,
        rate: Callable[[], float],
        on_change: Callable[[], None],
    ) -> None:
        self._cache = cache
        self._recorder = recorder
        self._rate = rate
        self._on_change = on_change
        self._pins: dict[Party, _Pin] = {}
        self._refused = 0
        self.policy = Sessions(cache.max_bytes * SHARE, recorder.now, self._seconds, self)

    def submitted(self, row: Row) -> None:
        """A row was made; told before the scheduler hears of it."""
        if row.request.agent and row.reads_cache and self._cache.max_bytes:
            trail = _trail(row, row.prompt, row.max_tokens)
            self.policy.arrived(row.id, party_of(row), trail, row.request.priority)

    def ended(self, row: Row, kept: int) -> None:
        """A row is over, of whose tokens so many were put."""
        kept = kept if row.reads_cache else 0
        output = np.array(row.output, row.prompt.dtype)
        tokens = np.concatenate([row.prompt, output])[:kept]
        usage = row.usage(self._recorder.now())
        hint = self.policy.ended(
            row.id,
            _trail(row, tokens, 0) if kept else None,
            usage.prefilled_tokens + usage.output_tokens,
            row.request.next_use,
        )
        if kept and hint is not None:
            self._hint(tokens, row.namespace, hint)

    def next_use(self, party: Party, seconds: float) -> None:
        """An agent is expected to go on in so many seconds; without a name all of its swarm."""
        members = [party] if party.agent else self.policy.members(party.tenant, party.swarm)
        for each in members:
            last = self.policy.expect(each, seconds)
            if last is not None:
                self._hint(last.tokens, last.namespace, seconds)
        self._on_change()

    def pin(self, party: Party, seconds: float) -> int:
        """Keep what an agent said last; returns how many tokens, 0 if memory has nothing of it.

        Raises `CacheError` if too much is pinned already.
        """
        last = self.policy.last(party)
        if last is None:
            return 0
        tokens, ttl = last.tokens, PINNED_FOR * seconds
        try:
            length = self._cache.pin(tokens, last.namespace, ttl)
        except CacheError as error:
            self._refused += 1
            self._recorder.note(events.PinRefused, **_named(party), error=str(error))
            raise
        before = self._pins.pop(party, None)
        now = self._recorder.now()
        self._pins = {party: pin for party, pin in self._pins.items() if pin.until > now}
        if length:
            self._pins[party] = _Pin(last.namespace, tokens[:length], now + ttl)
            self.policy.pinned(party, ttl)
        if before is not None:
            self._let_go(before)
        self.next_use(party, seconds)
        return length

    def unpin(self, party: Party) -> None:
        """Let an agent's pin end. Harmless without one."""
        pin = self._pins.pop(party, None)
        if pin is not None:
            self._let_go(pin)
        self.policy.pinned(party, 0.0)
        self._on_change()

    def statistics(self) -> SessionsStatistics:
        """How many there are, and what they take."""
        now = self._recorder.now()
        pins = sum(pin.until > now for pin in self._pins.values())
        return replace(self.policy.statistics(), pins=pins, pins_refused=self._refused)

    def waits(self, request: RequestId, shortage: Shortage) -> None:
        """The policy passes a request over."""
        need, held, budget = shortage
        self._recorder.note(
            events.Deferred, request=request, need=need, held=held, budget=int(budget)
        )

    def replaced(self, party: Party, last: Trail | None, request: RequestId) -> None:
        """The policy gave a session's place to a request: what it left is to leave first."""
        self._recorder.note(events.Displaced, **_named(party), request=request)
        if last is not None:
            self._hint(last.tokens, last.namespace, math.inf)

    def _seconds(self, tokens: int) -> float:
        rate = self._rate()
        return tokens / rate if rate else 0.0

    def _hint(self, tokens: Tokens, namespace: str, seconds: float) -> None:
        try:
            self._cache.next_use(tokens, seconds, namespace, instead=True)
        except Exception:  # nobody's request is to end for this
            _log.exception("when a sequence is needed again could not be noted")

    def _let_go(self, pin: _Pin) -> None:
        """Unpin, unless that is pinned for somebody else as well."""
        for other in self._pins.values():
            if other.namespace == pin.namespace and np.array_equal(other.tokens, pin.tokens):
                return
        self._cache.unpin(pin.tokens, pin.namespace)


def party_of(row: Row) -> Party:
    """For whom a row is computed."""
    request = row.request
    return Party(request.tenant, request.swarm, request.agent)


def _named(party: Party) -> dict[str, str]:
    return {"agent": party.agent, "swarm": party.swarm, "tenant": party.tenant}


def _trail(row: Row, tokens: Tokens, more: int) -> Trail:
    fixed = row.lane.kv_bytes(0, 0)
    return Trail.of(row.namespace, tokens, more, row.lane.kv_bytes(1, 0) - fixed, fixed)
