"""The lanes of a connection: jobs of one lane one after another, those of different lanes together.

A lane is made by its first job and forgotten after its last one, so that any number of lanes can
follow one another.
"""

from collections import deque
from collections.abc import Hashable
from http import HTTPStatus
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from ..errors import RETRY_SECONDS, ApiError

MAX_QUEUED = 64
"""Jobs that wait in one lane, behind the one that runs."""


class Job(Protocol):
    """Something that a lane does. `size` is what it holds in memory while it waits, in bytes."""

    size: int

    async def run(self) -> None:
        """Do it. Must not raise."""

    def cancel(self) -> None:
        """End it soon, also before it runs. Does not wait."""


class Lane:
    """`current` is what the lane is at; `queued` wait behind it."""

    __slots__ = ("current", "queued")

    def __init__(self) -> None:
        self.current: Job | None = None
        self.queued: deque[Job] = deque()


class Lanes:
    """At most `max_lanes` lanes at once, run in `tasks`; at most `max_bytes` wait in them."""

    def __init__(self, tasks: TaskGroup, max_lanes: int, max_bytes: int) -> None:
        self._tasks = tasks
        self._max_lanes = max_lanes
        self._max_bytes = max_bytes
        self._lanes: dict[Hashable, Lane] = {}
        self._bytes = 0
        self._idle: anyio.Event | None = None

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def queued(self) -> int:
        """How many jobs wait behind others."""
        return sum(len(lane.queued) for lane in self._lanes.values())

    def put(self, key: Hashable, job: Job) -> None:
        """Have a lane do a job, after those it has. Raises `ApiError` for what is too much."""
        lane = self._lanes.get(key)
        if self._bytes + job.size > self._max_bytes and self._bytes:
            raise _too_many(
                f"{self._bytes:,} bytes of requests wait on this connection, and these are "
                f"{job.size:,} more; {self._max_bytes:,} may"
            )
        if lane is None:
            if len(self._lanes) >= self._max_lanes:
                raise _too_many(
                    f"{len(self._lanes):,} lanes are at work on this connection; no more may be"
                )
            lane = self._lanes[key] = Lane()
            self._tasks.start_soon(self._work, key, lane)
        elif len(lane.queued) >= MAX_QUEUED:
            raise _too_many(f"{len(lane.queued):,} requests wait in this lane; no more may")
        lane.queued.append(job)
        self._bytes += job.size

    def current(self, key: Hashable) -> Job | None:
        """What a lane is at, or will be next."""
        lane = self._lanes.get(key)
        if lane is None:
            return None
        return lane.current or lane.queued[0]

    async def wait_idle(self) -> None:
        """Wait until no lane has anything to do."""
        while self._lanes:
            self._idle = self._idle or anyio.Event()
            await self._idle.wait()

    async def _work(self, key: Hashable, lane: Lane) -> None:
        try:
            while lane.queued:
                lane.current = job = lane.queued.popleft()
                self._bytes -= job.size
                await job.run()
                lane.current = None
        finally:
            del self._lanes[key]
            if not self._lanes and self._idle is not None:
                self._idle.set()
                self._idle = None


def _too_many(message: str) -> ApiError:
    return ApiError(
        HTTPStatus.TOO_MANY_REQUESTS,
        message,
        type="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after=RETRY_SECONDS,
    )
