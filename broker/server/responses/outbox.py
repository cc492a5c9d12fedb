"""What waits to be sent over one WebSocket: bounded, merged where it waits, sent by one task.

Who writes waits for room (`put`), so what waits exceeds the bound by one event at most. The engine
does not wait with it: what it computes meanwhile gathers where the writer reads.

Deltas of one item that wait are merged. The merged one has the last of their sequence numbers: a
client that resumes after it misses nothing and gets nothing twice. So a gap in the numbers before
a delta says that deltas were merged, and nothing is lost.
"""

from collections import deque
from collections.abc import Awaitable, Callable

import anyio
import msgspec
from msgspec.structs import replace

from .events import ArgumentsDelta, ReasoningDelta, ResponseEvent, TextDelta

DELTA_BYTES = 512
"""What a delta that waits is taken to need, beside its text."""
LOGPROB_BYTES = 256
TRACE_SHARE = 4
"""Trace events may have so large a part of the bound."""

DELTAS = (TextDelta, ReasoningDelta, ArgumentsDelta)
Mergeable = TextDelta | ReasoningDelta | ArgumentsDelta

_encode = msgspec.json.Encoder().encode


class Stalled(Exception):
    """The client has not taken enough for too long."""


class Source:
    """One sequence of events: what one response sends, or one that is sent again.

    `stream_id` is on each of its events, if there is one.
    """

    def __init__(self, stream_id: str | None = None) -> None:
        self.suffix = b"" if stream_id is None else b',"stream_id":' + _encode(stream_id) + b"}"
        self.last: _Waiting | None = None

    def encode(self, event: object) -> bytes:
        """An event as JSON."""
        data = _encode(event)
        return data[:-1] + self.suffix if self.suffix else data


class Outbox:
    """Messages for one client, sent with `send` in their order, those of the trace last.

    `max_bytes` bounds what waits: once that is exceeded the outbox `is_full`, until half of it has
    been sent. Where that takes longer than `stall_seconds`, `watch` raises `Stalled`.
    """

    def __init__(
        self, send: Callable[[str], Awaitable[None]], max_bytes: int, stall_seconds: float
    ) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.sent = 0
        self.merged = 0
        self.dropped = 0
        self.is_full = False
        self._send = send
        self._stall_seconds = stall_seconds
        self._waiting: deque[_Waiting | bytes] = deque()
        self._trace: deque[bytes] = deque()
        self._trace_bytes = 0
        self._untold = 0
        self._is_sending = False
        self._full_since = 0.0
        self._news: anyio.Event | None = None
        self._room: anyio.Event | None = None
        self._filled = anyio.Event()
        self._drained: anyio.Event | None = None

    async def put(self, source: Source, event: ResponseEvent) -> None:
        """Add an event, as soon as there is room."""
        if self.is_full:
            await self._wait_for_room()
        if type(event) in DELTAS:
            self._put_delta(source, event)  # type: ignore[arg-type]
        else:
            source.last = None
            self._add(source.encode(event))

    async def say(self, event: object, source: Source | None = None) -> None:
        """Add an event that is not a response's, as soon as there is room."""
        if self.is_full:
            await self._wait_for_room()
        self._add((source or Source()).encode(event))

    def put_trace(self, data: bytes) -> None:
        """Add an event that may be dropped: where there is little room, and until it was told that
        some were.
        """
        room = self.max_bytes // TRACE_SHARE
        if self._untold or self.is_full or self._trace_bytes + len(data) > room:
            self._drop(1)
        else:
            self._trace.append(data)
            self._trace_bytes += len(data)
        self._wake()

    async def write(self) -> None:
        """Send what comes, until cancelled or `send` raises."""
        while True:
            while (data := self._next()) is not None:
                self._is_sending = True
                await self._send(data.decode())
                self._is_sending = False
                self.sent += 1
            if self._drained is not None:
                self._drained.set()
                self._drained = None
            self._news = anyio.Event()
            await self._news.wait()

    async def watch(self) -> None:
        """Raise `Stalled` once more has waited for too long than may."""
        while True:
            if not self.is_full:
                self._filled = anyio.Event()
                await self._filled.wait()
                continue
            left = self._full_since + self._stall_seconds - anyio.current_time()
            if left <= 0:
                raise Stalled
            await anyio.sleep(left)

    async def drained(self) -> None:
        """Wait until all is sent."""
        while self._waiting or self._trace or self._untold or self._is_sending:
            self._drained = self._drained or anyio.Event()
            await self._drained.wait()

    def check_integrity(self) -> None:
        """Raise `AssertionError` if a total is not the sum of its parts."""
        sizes = [e.bytes if isinstance(e, _Waiting) else len(e) for e in self._waiting]
        assert self.bytes == sum(sizes)
        assert self._trace_bytes == sum(map(len, self._trace))

    def _put_delta(self, source: Source, event: Mergeable) -> None:
        last = source.last
        if last is not None and last.takes(event):
            self.merged += 1
            self._grow(last.add(event))
            return
        source.last = waiting = _Waiting(source, event)
        self._waiting.append(waiting)
        self._grow(waiting.bytes)
        self._wake()

    def _add(self, data: bytes) -> None:
        self._waiting.append(data)
        self._grow(len(data))
        self._wake()

    def _next(self) -> bytes | None:
        """The next message; that trace events were dropped is told when nothing else waits."""
        if self._waiting:
            first = self._waiting.popleft()
            if isinstance(first, _Waiting):
                self._shrink(first.bytes)
                return first.encode()
            self._shrink(len(first))
            return first
        if self._trace:
            data = self._trace.popleft()
            self._trace_bytes -= len(data)
            return data
        if self._untold:
            count, self._untold = self._untold, 0
            return b'{"type":"broker.trace.dropped","count":%d}' % count
        return None

    def _grow(self, size: int) -> None:
        self.bytes += size
        if self.bytes > self.max_bytes and not self.is_full:
            self.is_full = True
            self._full_since = anyio.current_time()
            self._filled.set()
            self._drop(len(self._trace))
            self._trace.clear()
            self._trace_bytes = 0

    def _shrink(self, size: int) -> None:
        self.bytes -= size
        # Not at every message: each time all who wait are woken.
        if self.is_full and self.bytes <= self.max_bytes // 2:
            self.is_full = False
            if self._room is not None:
                self._room.set()
                self._room = None

    def _drop(self, count: int) -> None:
        self._untold += count
        self.dropped += count

    async def _wait_for_room(self) -> None:
        while self.is_full:
            self._room = self._room or anyio.Event()
            await self._room.wait()

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None


class _Waiting:
    """A delta that waits, and those that were merged into it."""

    __slots__ = ("_event", "_more", "_source", "bytes")

    def __init__(self, source: Source, event: Mergeable) -> None:
        self._source = source
        self._event = event
        self._more: list[Mergeable] = []
        self.bytes = DELTA_BYTES + _size(event)

    def takes(self, event: Mergeable) -> bool:
        """Whether a delta goes on where this one ends."""
        mine = self._event
        if type(event) is not type(mine) or event.item_id != mine.item_id:
            return False
        return isinstance(event, ArgumentsDelta) or event.content_index == mine.content_index  # type: ignore[union-attr]

    def add(self, event: Mergeable) -> int:
        """Merge a delta; by how many bytes this one has grown."""
        self._more.append(event)
        size = _size(event)
        self.bytes += size
        return size

    def encode(self) -> bytes:
        """All of it as one event. Nothing can be merged into it any more."""
        source = self._source
        if source.last is self:
            source.last = None
        return source.encode(self._merged() if self._more else self._event)

    def _merged(self) -> Mergeable:
        parts = [self._event, *self._more]
        text = "".join([part.delta for part in parts])
        number = parts[-1].sequence_number
        if isinstance(self._event, TextDelta):
            logprobs = tuple(
                [item for part in parts if isinstance(part, TextDelta) for item in part.logprobs]
            )
            return replace(self._event, sequence_number=number, delta=text, logprobs=logprobs)
        return replace(self._event, sequence_number=number, delta=text)


def _size(event: Mergeable) -> int:
    """About how many bytes a delta's own text and numbers take."""
    size = len(event.delta)
    if isinstance(event, TextDelta) and event.logprobs:
        size += sum(LOGPROB_BYTES * (1 + len(item.top_logprobs)) for item in event.logprobs)
    return size
