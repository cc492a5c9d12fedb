"""Turns that are answered together: each runs beside the others, and all or none come to an end."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from types import TracebackType
from typing import Self, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from ..errors import ApiError
from .generation import Generation, Generator
from .turn import Ended, Turn, TurnEvent

Result = TypeVar("Result")
Item = tuple[int, TurnEvent | Exception]


class Choices:
    """Turns that were started. An async context manager: leaving it cancels what still runs."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._generations = tuple(generations)
        self._stack = AsyncExitStack()

    @classmethod
    async def start(cls, generator: Generator, turns: Sequence[Turn]) -> Self:
        """Queue all the turns. What would refuse one is raised here, and none is left."""
        async with AsyncExitStack() as stack:
            started = [
                await stack.enter_async_context(await generator.start(turn)) for turn in turns
            ]
            choices = cls(started)
            choices._stack = stack.pop_all()
        return choices

    async def read(self, reader: Callable[["Events"], Awaitable[Result]]) -> Result:
        """What `reader` makes of the events of all turns, which run beside each other until it
        returns. What it raises comes out as it is.
        """
        send, receive = anyio.create_memory_object_stream[Item](0)
        results: list[Result] = []
        errors: list[Exception] = []
        async with anyio.create_task_group() as tasks:
            with receive:
                with send:
                    for index, generation in enumerate(self._generations):
                        tasks.start_soon(_pump, index, generation, send.clone())
                try:
                    results.append(await reader(Events(receive)))
                except Exception as error:
                    errors.append(error)
                tasks.cancel_scope.cancel()
        if errors:
            raise errors.pop()
        return results.pop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()


class Events:
    """Pairs of a turn's place among the choices and an event of it.

    Raises what one of them raises, and `ApiError` where one is cancelled: there is no answer then.
    """

    def __init__(self, items: MemoryObjectReceiveStream[Item]) -> None:
        self._items = items

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, TurnEvent]:
        try:
            index, event = await self._items.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None
        if isinstance(event, Exception):
            raise event
        if isinstance(event, Ended) and event.finish_reason == "cancelled":
            raise ApiError(
                503, "the server ended the request", type="server_error", code="cancelled"
            )
        return index, event


async def _pump(index: int, generation: Generation, send: MemoryObjectSendStream[Item]) -> None:
    with send:
        try:
            async with aclosing(aiter(generation)) as events:
                async for event in events:
                    await send.send((index, event))
        except Exception as error:
            await send.send((index, error))
