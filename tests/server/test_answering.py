"""Choices that are answered together: one failure is the failure of all, and nothing goes on."""

from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from mlx_swarm.broker.request import Sampling
from mlx_swarm.broker.server.errors import ApiError, invalid
from mlx_swarm.broker.server.service import Service
from mlx_swarm.broker.server.turns.answering import answered, streamed_answer, whole_answer
from mlx_swarm.broker.server.turns.choices import Choices, Events
from mlx_swarm.broker.server.turns.generation import Generator
from mlx_swarm.broker.server.turns.histories import Histories
from mlx_swarm.broker.server.turns.turn import Ended, Turn
from tests.server.idle import IDLE, idle_route
from tests.server.serving import serving
from tests.tiny_broker import TINY, check_idle, tiny

LONG = Turn(prompt=(1, 2, 3), max_tokens=200, sampling=Sampling(min_tokens=200))
REFUSED = Turn(prompt=(1, 2, 3), model="nobody")


def _routes(service: Service) -> list[BaseRoute]:
    async def chunks(events: Events) -> AsyncIterator[object]:
        async for index, _ in events:
            yield {"index": index}
            raise KeyError("secret")

    async def whole(events: Events) -> object:
        async for _ in events:
            raise invalid("no good", "prompt")
        return {}

    async def stream(request: Request) -> Response:
        await request.body()
        return await streamed_answer(request, service, [LONG, LONG], chunks)

    async def at_once(request: Request) -> Response:
        await request.body()
        return await whole_answer(request, service.generator, [LONG, LONG], whole)

    async def refused(request: Request) -> Response:
        await request.body()
        return await streamed_answer(request, service, [LONG, REFUSED], chunks)

    paths = {"/stream": stream, "/whole": at_once, "/refused": refused}
    routes = [Route(path, answered(endpoint)) for path, endpoint in paths.items()]
    return [*routes, idle_route(service)]


def test_a_failure_ends_all_and_is_told_where_it_still_can_be(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(TINY, routes=_routes) as url, httpx.Client(base_url=url) as client:
        stream = client.get("/stream")
        assert stream.status_code == 200
        events = [line for line in stream.text.split("\n\n") if line.startswith("data:")]
        assert '"error"' in events[-1]
        assert "[DONE]" not in stream.text
        assert client.get(IDLE).text == "idle"
        whole = client.get("/whole")
        assert (whole.status_code, whole.json()["error"]["param"]) == (400, "prompt")
        assert client.get(IDLE).text == "idle"
        refused = client.get("/refused")
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "model")
        assert client.get(IDLE).text == "idle"
    assert "KeyError" in caplog.text
    assert "secret" not in stream.text + caplog.text


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_turn_that_is_cancelled_is_no_answer() -> None:
    async def read(events: Events) -> None:
        async for _, event in events:
            choices._generations[0].cancel()
            assert not isinstance(event, Ended)

    async with tiny() as broker:
        generator = Generator(broker, Histories())
        async with await Choices.start(generator, [LONG]) as choices:
            with pytest.raises(ApiError) as ended:
                await choices.read(read)
        assert ended.value.code == "cancelled"
        await check_idle(broker)
