"""What happens in a swarm, as frozen records to `match` on, and the feed that carries them."""

from collections import deque
from typing import Self
from weakref import WeakSet

import anyio
from msgspec import Struct

from mlx_swarm.broker.request import FinishReason, TokenLogprob, Usage


class AgentEvent(Struct, frozen=True, kw_only=True, tag_field="event", tag=True):
    """Base of a swarm's events. `turn` counts from 0."""

    agent: str
    turn: int


class AgentStarted(AgentEvent, frozen=True):
    """A turn left the queue; prompt_tokens = ram_tokens + cold_tokens + those to prefill."""

    prompt_tokens: int
    ram_tokens: int
    cold_tokens: int


class AgentDelta(AgentEvent, frozen=True):
    """New text of a turn, and the tokens behind it with their log-probabilities if asked for."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class AgentFinished(AgentEvent, frozen=True):
    """A turn is complete. `ttft_seconds` runs from its submission to its first token."""

    text: str
    finish_reason: FinishReason
    usage: Usage
    ttft_seconds: float


class AgentFailed(AgentEvent, frozen=True):
    """A turn ended with an error, which whoever awaits the agent gets."""

    error: str
    usage: Usage


class AgentStopped(AgentEvent, frozen=True):
    """A turn was cancelled."""

    usage: Usage


SwarmEvent = AgentStarted | AgentDelta | AgentFinished | AgentFailed | AgentStopped


class Signal:
    """Wakes whoever waits; costs nothing while nobody does."""

    def __init__(self) -> None:
        self._event: anyio.Event | None = None

    def notify(self) -> None:
        """Wake all who wait now."""
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait(self) -> None:
        """Return at the next `notify`."""
        if self._event is None:
            self._event = anyio.Event()
        await self._event.wait()


class EventFeed:
    """Hands every event to every subscriber. `running` counts the turns that are not over."""

    def __init__(self) -> None:
        self.running = 0
        self._has_begun = False
        self._subscribers: WeakSet[EventStream] = WeakSet()

    @property
    def is_idle(self) -> bool:
        """Whether all turns so far are over; not before the first, or the end of the scope."""
        return self._has_begun and not self.running

    @property
    def has_subscribers(self) -> bool:
        """Whether anybody listens; without, an event need not be made."""
        return bool(self._subscribers)

    def subscribe(self) -> "EventStream":
        """A stream of the events from now on. One that is dropped is forgotten."""
        stream = EventStream(self)
        self._subscribers.add(stream)
        return stream

    def turn_begins(self) -> None:
        """Count a turn; streams do not end before it does."""
        self.running += 1
        self._has_begun = True

    def turn_ends(self) -> None:
        """Count a turn out; with the last one, the streams end."""
        self.running -= 1
        self._wake_if_idle()

    def close(self) -> None:
        """No more turns will begin."""
        self._has_begun = True
        self._wake_if_idle()

    def publish(self, event: SwarmEvent) -> None:
        """Append an event to every stream."""
        for stream in self._subscribers:
            stream.waiting.append(event)
            stream.signal.notify()

    def _wake_if_idle(self) -> None:
        if self.is_idle:
            for stream in self._subscribers:
                stream.signal.notify()


class EventStream:
    """An async iterator over a swarm's events. It ends when no turn is running or queued any more;
    one that was begun before the first turn waits for it.
    """

    def __init__(self, feed: EventFeed) -> None:
        self.waiting: deque[SwarmEvent] = deque()
        self.signal = Signal()
        self._feed = feed

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SwarmEvent:
        while not self.waiting:
            if self._feed.is_idle:
                raise StopAsyncIteration
            await self.signal.wait()
        return self.waiting.popleft()
