"""What the lanes of a connection do: responses, and the events of earlier ones again."""

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

import anyio

from ..errors import ApiError, api_error, invalid
from ..turns.turn import Caller
from .outbox import Outbox, Source
from .ring import EventRing
from .run import ResponseRun, start_run
from .wire import CreateResponse

if TYPE_CHECKING:
    from .socket import Connection


class Turn:
    """A job of a lane: one response, from its start to its last event."""

    def __init__(
        self,
        connection: "Connection",
        body: CreateResponse,
        caller: Caller,
        stream_id: str | None,
        size: int,
    ) -> None:
        self.size = size
        self._connection = connection
        self._body = body
        self._caller = caller
        self._stream_id = stream_id
        self._run: ResponseRun | None = None
        self._is_cancelled = False

    def cancel(self) -> None:
        """End it soon, as cancelled, also if it has not started."""
        self._is_cancelled = True
        if self._run is not None:
            self._run.cancel()

    async def run(self) -> None:
        """Compute the response, and send its events as they come."""
        connection = self._connection
        try:
            with connection.service.draining.work():
                run = await start_run(
                    connection.service, self._body, self._caller, connection.stores
                )
                await self._tell(run)
        except Exception as error:
            await connection.refuse(error, self._stream_id)

    async def _tell(self, run: ResponseRun) -> None:
        connection, source = self._connection, Source(self._stream_id)
        self._run = connection.runs[run.id] = run
        connection.replays.add(run)
        if self._is_cancelled:
            run.cancel()
        try:
            async with run:
                async for event in run:
                    await connection.outbox.put(source, event)
        finally:
            self._run = None
            del connection.runs[run.id]
            connection.replays.end(run.id)


class Replaying:
    """A job of a lane: sends the events of a ring after a number, and then those to come."""

    size = 0

    def __init__(
        self,
        outbox: Outbox,
        ring: EventRing,
        starting_after: int,
        stream_id: str | None,
        refuse: Callable[[Exception, str | None], Awaitable[None]],
    ) -> None:
        check_kept(ring, starting_after)
        self._outbox = outbox
        self._ring = ring
        self._after = starting_after
        self._stream_id = stream_id
        self._refuse = refuse
        self._scope = anyio.CancelScope()

    def cancel(self) -> None:
        """Send no more of them."""
        self._scope.cancel()

    async def run(self) -> None:
        """Send them."""
        source = Source(self._stream_id)
        with self._scope:
            try:
                async with aclosing(self._ring.follow(self._after)) as events:
                    async for event in events:
                        await self._outbox.put(source, event)
                        self._after = event.sequence_number
            except Exception as error:
                known = api_error(error)
                await self._refuse(_gone(self._ring, self._after) or known, self._stream_id)


def check_kept(ring: EventRing, starting_after: int) -> None:
    """Raise `ApiError` unless the events after a number are all there."""
    gone = _gone(ring, starting_after)
    if gone is not None:
        raise gone


def _gone(ring: EventRing, starting_after: int) -> ApiError | None:
    if starting_after + 1 >= ring.first:
        return None
    return invalid(
        f"starting_after is {starting_after}; the first event that is still kept has the number "
        f"{ring.first}",
        "starting_after",
        "events_gone",
    )
