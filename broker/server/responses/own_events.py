"""Events over WebSocket that OpenAI does not have, for clients that ask: trace, statistics, resume.

`broker.subscribe` starts `broker.trace` (one trace event each) and `broker.statistics` (one a
second); `broker.resume` sends the events of a response again that are still kept.
"""

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from ...trace.events import Event, Queued, encode
from ...trace.recorder import Recorder
from ..admin.visibility import Sight
from ..errors import invalid
from .outbox import Outbox, Source
from .ring import EventRing
from .run import ResponseRun
from .store import Stores, not_found

Tell = Callable[[], Awaitable[None]]

POLL_SECONDS = 0.1
STATISTICS_SECONDS = 1.0
BATCH = 512
REMEMBERED = 4096
GRACE_SECONDS = 60.0
MAX_REPLAYS = 64


class Mine:
    """The requests of one connection among all of a trace, by the agents they are computed for."""

    def __init__(self, tenant: str) -> None:
        self._tenant = tenant
        self._agents: OrderedDict[str, None] = OrderedDict()
        self._requests: OrderedDict[str, None] = OrderedDict()

    def add(self, agent: str) -> None:
        """An agent of this connection; to be told before its request is queued."""
        _remember(self._agents, agent)

    def has(self, event: Event) -> bool:
        """Whether an event is about one of its requests. Has to be shown every event."""
        if isinstance(event, Queued) and event.tenant == self._tenant:
            if event.agent in self._agents:
                _remember(self._requests, event.request)
        return getattr(event, "request", None) in self._requests


def _remember(names: OrderedDict[str, None], name: str) -> None:
    names[name] = None
    names.move_to_end(name)
    if len(names) > REMEMBERED:
        names.popitem(last=False)


async def send_trace(
    outbox: Outbox, recorder: Recorder, sight: Sight, wanted: Callable[[Event], bool]
) -> None:
    """Send what happens from now on, until cancelled; `number` is what /v1/trace calls `since`.

    What happened before is looked through too: it says whose request is whose.
    """
    at, first = 0, recorder.statistics().emitted
    while True:
        tail = recorder.since(at, BATCH)
        at = tail.next
        for number, event in enumerate(tail.events, tail.number):
            seen = sight.see(event)
            is_wanted = wanted(event)
            if seen is not None and is_wanted and number >= first:
                outbox.put_trace(
                    b'{"type":"broker.trace","number":%d,"event":%b}' % (number + 1, encode(seen))
                )
        await anyio.sleep(0 if len(tail.events) == BATCH else POLL_SECONDS)


async def send_statistics(outbox: Outbox, look: Callable[[], object]) -> None:
    """Send what `look` returns every second, until cancelled."""
    source = Source()
    while True:
        outbox.put_trace(source.encode(look()))
        await anyio.sleep(STATISTICS_SECONDS)


class Subscriptions:
    """What a client has asked to be told, each by a task of its own."""

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self._scopes: dict[str, anyio.CancelScope] = {}

    @property
    def names(self) -> list[str]:
        """What it is told now."""
        return sorted(self._scopes)

    def start(self, name: str, tell: Tell) -> None:
        """Tell it something from now on, in place of what it was told under this name."""
        self.stop([name])
        self._scopes[name] = scope = anyio.CancelScope()
        self._tasks.start_soon(self._run, scope, tell)

    def stop(self, names: Iterable[str] | None = None) -> None:
        """Tell it no more of these, or of anything."""
        for name in list(self._scopes if names is None else names):
            if scope := self._scopes.pop(name, None):
                scope.cancel()

    async def _run(self, scope: anyio.CancelScope, tell: Tell) -> None:
        with scope:
            await tell()


class _Replay(NamedTuple):
    tenant: str
    ring: EventRing
    ended: float | None


class Replays:
    """The events of responses that nobody keeps (`store: false`), for a minute after their end.

    Of those that have ended the last 64 at most are here.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running: dict[str, _Replay] = {}
        self._ended: OrderedDict[str, _Replay] = OrderedDict()

    def add(self, run: ResponseRun) -> None:
        """Remember a run that begins."""
        if not run.response.store:
            self._running[run.id] = _Replay(run.caller.tenant, run.ring, None)

    def end(self, id: str) -> None:
        """It has ended."""
        replay = self._running.pop(id, None)
        if replay is not None:
            self._ended[id] = replay._replace(ended=self._clock())
        self._forget()

    def find(self, id: str, tenant: str) -> EventRing | None:
        """The events of a tenant's response."""
        self._forget()
        replay = self._running.get(id) or self._ended.get(id)
        return replay.ring if replay is not None and replay.tenant == tenant else None

    def _forget(self) -> None:
        while self._ended:
            ended = next(iter(self._ended.values())).ended
            is_old = ended is not None and self._clock() - ended > GRACE_SECONDS
            if not is_old and len(self._ended) <= MAX_REPLAYS:
                return
            self._ended.popitem(last=False)


def find_events(id: str, tenant: str, stores: Stores, replays: Replays) -> EventRing:
    """The events of a tenant's response. Raises `ApiError` if it has none, or they are gone."""
    run = stores.live.find(id, tenant)
    ring = run.ring if run is not None else replays.find(id, tenant)
    if ring is not None:
        return ring
    if stores.find(id, tenant) is None:
        raise not_found(id)
    ring = stores.live.events(id)
    if ring is None:
        raise invalid(f"the events of the response '{id}' are gone", "response_id", "events_gone")
    return ring
