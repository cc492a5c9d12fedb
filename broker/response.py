"""The events of one request, as its reader gets them."""

from typing import TYPE_CHECKING, Self

from .engine.mailbox import Mailbox
from .engine.thread import EngineThread
from .request import RequestId, StreamEvent

if TYPE_CHECKING:
    from .engine.loop import EngineLoop


class ResponseStream:
    """The events of one request, each given out once. Iterate, or use as an async context manager.

    A reader may be slow: deltas it has not read are merged. Leaving the context or dropping the
    stream cancels the request.
    """

    def __init__(
        self, request: RequestId, mailbox: Mailbox, thread: "EngineThread[EngineLoop]"
    ) -> None:
        self.request = request
        self._mailbox = mailbox
        self._thread = thread

    async def accepted(self) -> None:
        """Wait until the request is in the queue; raises what refused it, as iterating would."""
        await self._thread.call(lambda engine: None)
        self._mailbox.raise_refusal()

    def cancel(self) -> None:
        """End the request within one prefill chunk or decode step; what it computed is kept.

        Does not wait. The stream then ends with a `Completed` whose finish reason is "cancelled".
        Safe anywhere, from any thread, and when the request has ended already.
        """
        if not self._mailbox.ended:
            request = self.request
            self._thread.post_from_finaliser(lambda engine: engine.cancel(request))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamEvent:
        event = await self._mailbox.receive()
        if event is None:
            raise StopAsyncIteration
        return event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()
