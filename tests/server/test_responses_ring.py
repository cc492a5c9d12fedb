"""The ring of a response's events."""

import asyncio

import anyio
import pytest

from mlx_swarm.broker.server.errors import ApiError
from mlx_swarm.broker.server.responses.events import ResponseEvent
from mlx_swarm.broker.server.responses.ring import EventRing


def filled(count: int, max_events: int = 100) -> EventRing:
    ring = EventRing(max_events)
    for number in range(count):
        ring.push(ResponseEvent(sequence_number=number))
    return ring


async def read(ring: EventRing, after: int = -1) -> list[int]:
    return [event.sequence_number async for event in ring.follow(after)]


def test_a_follower_gets_what_was_and_what_comes() -> None:
    async def run() -> list[int]:
        ring, got = filled(3), list[int]()

        async def follow() -> None:
            got.extend(await read(ring, 0))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow)
            for number in range(3, 6):
                await anyio.lowlevel.checkpoint()
                ring.push(ResponseEvent(sequence_number=number))
            ring.close()
        return got

    assert asyncio.run(run()) == [1, 2, 3, 4, 5]


def test_only_the_last_events_are_kept() -> None:
    async def run() -> list[int]:
        ring = filled(10, max_events=4)
        ring.close()
        with pytest.raises(ApiError, match="the events up to 5 of this response are gone"):
            ring.check(4)
        return await read(ring, 5)

    assert asyncio.run(run()) == [6, 7, 8, 9]


def test_a_follower_that_falls_behind_is_told() -> None:
    async def run() -> None:
        ring = filled(2, max_events=2)
        events = ring.follow()
        assert (await anext(events)).sequence_number == 0
        for number in range(2, 5):
            ring.push(ResponseEvent(sequence_number=number))
        with pytest.raises(ApiError, match="are gone"):
            await anext(events)

    asyncio.run(run())
