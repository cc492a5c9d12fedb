"""Runs of responses on a broker, without HTTP."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mlx_swarm.broker.errors import EngineFailed, OutOfMemory
from mlx_swarm.broker.server.errors import ApiError
from mlx_swarm.broker.server.responses.objects import Response
from mlx_swarm.broker.server.responses.routes import RunFrames
from mlx_swarm.broker.server.responses.run import ResponseRun, start_run
from mlx_swarm.broker.server.responses.wire import CreateResponse
from mlx_swarm.broker.server.service import Service, service_over
from mlx_swarm.broker.server.settings import ServerSettings
from mlx_swarm.broker.server.turns.generation import Generation
from mlx_swarm.broker.server.turns.turn import Caller
from tests.tiny_broker import check_idle, tiny


class World:
    """A broker and the stores of a server."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.stores = service.stores

    async def start(self, caller: Caller | None = None, **fields: Any) -> ResponseRun:
        given = {"input": "a", "temperature": 0.0, "max_output_tokens": 4, **fields}
        body = CreateResponse(**given)
        return await start_run(self.service, body, caller or Caller(), self.stores)

    async def whole(self, caller: Caller | None = None, **fields: Any) -> Response:
        async with await self.start(caller, **fields) as run:
            return await run.end()

    def agent(self, response: Response) -> str:
        stored = self.stores.find(response.id, "")
        assert stored is not None
        return stored.agent


def in_world(test: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        async with tiny() as broker:
            world = World(service_over(broker, ServerSettings()))
            await test(world)
            assert len(world.stores.live) == 0
            world.stores.shared.check_integrity()
            await check_idle(broker)

    asyncio.run(run())


def test_who_goes_on_is_the_same_agent_and_forks_are_new_ones() -> None:
    async def test(world: World) -> None:
        first = await world.whole(Caller(agent="writer"))
        second = await world.whole(previous_response_id=first.id)
        fork = await world.whole(previous_response_id=first.id)
        assert (world.agent(first), world.agent(second)) == ("writer", "writer")
        assert world.agent(fork) not in ("", "writer")
        named = await world.whole(Caller(agent="editor"), previous_response_id=second.id)
        assert world.agent(named) == "editor"
        async with await world.start(Caller(agent="writer"), input="b") as running:
            beside = await world.whole(previous_response_id=second.id)
            await running.end()
        assert world.agent(beside) not in ("", "writer")

    in_world(test)


def test_a_continuation_that_is_refused_leaves_the_agent_its_place() -> None:
    async def test(world: World) -> None:
        first = await world.whole(Caller(agent="writer"))
        with pytest.raises(ApiError) as refused:
            await world.whole(previous_response_id=first.id, input="b" * 1000)
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
        assert world.agent(await world.whole(previous_response_id=first.id)) == "writer"

    in_world(test)


def test_leaving_a_run_cancels_it_and_keeps_what_there_is() -> None:
    async def test(world: World) -> None:
        async with await world.start(max_output_tokens=200, min_tokens=200) as run:
            async for event in run:
                if event.type == "response.output_text.delta":
                    break
        stored = world.stores.find(run.id, "")
        assert stored is not None
        assert stored.response.status == "cancelled"
        assert len(stored.response.output) == 1
        async with await world.start() as unread:
            pass
        assert unread.response.status == "cancelled"
        await world.whole(previous_response_id=run.id)

    in_world(test)


def test_a_stream_that_nobody_read_is_over_when_it_is_closed() -> None:
    async def test(world: World) -> None:
        first = await world.whole(Caller(agent="writer"))
        frames = RunFrames(await world.start(previous_response_id=first.id))
        await frames.aclose()
        assert not world.stores.live.is_running("", "writer")
        assert not world.service.generator.histories._running

    in_world(test)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (OutOfMemory("3 GiB are needed"), 503, "server_error"),
        (EngineFailed("a step failed"), 500, "server_error"),
        (ZeroDivisionError("secret"), 500, "server_error"),
    ],
)
def test_what_fails_on_the_way_is_told(
    error: Exception, status: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise error

    async def test(world: World) -> None:
        monkeypatch.setattr(Generation, "_ended", fail)
        async with await world.start(min_tokens=4) as run:
            events = [event async for event in run]
            with pytest.raises(ApiError) as failed:
                await run.end()
        assert failed.value.status == status
        assert events[-1].type == "response.failed"
        assert "response.output_item.done" in [event.type for event in events]
        assert run.response.status == "failed"
        assert run.response.error is not None
        assert run.response.error.code == code
        assert "secret" not in run.response.error.message

    in_world(test)
