"""The Messages API on the wire: events as they are sent, headers, and clients that go away."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio.lowlevel
import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from mlx_swarm.broker import Broker
from mlx_swarm.broker.server.messages.routes import OPERATIONS, routes
from mlx_swarm.broker.server.service import Service, service_over
from mlx_swarm.broker.server.settings import ServerSettings
from mlx_swarm.broker.trace.events import Cancelled
from tests.server.serving import serving
from tests.tiny_broker import TINY, check_idle, inside

MODEL = TINY.replace("context=256", "context=4096")
PATH = "/v1/messages"
ENDLESS = {
    "output_config": {
        "format": {"type": "json_schema", "schema": {"type": "string", "minLength": 100_000}}
    },
    "max_tokens": 4000,
}


def _body(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Tell me something."}]
    return {"model": MODEL, "max_tokens": 4, "temperature": 0, "messages": messages, **fields}


@contextmanager
def _client(**settings: Any) -> Iterator[httpx.Client]:
    with (
        serving(MODEL, routes=_routes, settings=ServerSettings(**settings)) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


def _routes(service: Service) -> list[BaseRoute]:
    """Those of the API, and one that waits until so many requests were cancelled."""

    async def cancelled(request: Request) -> Response:
        wanted = int(request.path_params["wanted"])
        while await _cancelled(service.broker) < wanted:
            await anyio.lowlevel.checkpoint()
        await check_idle(service.broker)
        return Response()

    return [*routes(service), Route("/cancelled/{wanted}", cancelled)]


def test_a_stream_begins_at_once_and_ends_with_all_figures() -> None:
    with _client() as client:
        answer = client.post(PATH, json=_body(stream=True))
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["request-id"].startswith("req_")
    events = list(_events(answer.text))
    assert [name for name, _ in events] == [event["type"] for _, event in events]
    message = events[0][1]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    assert message["usage"]["output_tokens"] == 0
    delta = events[-2][1]
    assert delta["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert delta["usage"]["input_tokens"] == message["usage"]["input_tokens"]
    assert delta["usage"]["output_tokens"] == 4


def test_pings_fill_the_time_in_which_nothing_happens() -> None:
    messages = [{"role": "user", "content": "x" * 3000}]
    with _client(ping_seconds=0.001) as client:
        answer = client.post(PATH, json=_body(stream=True, messages=messages))
    assert ("ping", {"type": "ping"}) in _events(answer.text)


def test_versions_and_betas_are_let_be() -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "some-2026-01-01,other"}
    with _client() as client:
        answer = client.post(f"{PATH}?beta=true", json=_body(), headers=headers)
    assert answer.status_code == 200
    assert answer.json()["type"] == "message"
    assert set(answer.json()["usage"]) >= {"input_tokens", "cache_read_input_tokens"}


def test_an_error_has_anthropics_shape_and_the_same_name_as_its_header() -> None:
    with _client() as client:
        for content in ('{"model": ', "7", "[]", '"\\ud800"', b"\xff", "[" * 100_000):
            answer = client.post(PATH, content=content)
            assert answer.status_code == 400
            told = answer.json()
            assert told["type"] == "error"
            assert told["error"]["type"] == "invalid_request_error"
            assert told["request_id"] == answer.headers["request-id"]


def test_a_client_that_goes_away_leaves_nothing() -> None:
    with _client() as client:
        with client.stream("POST", PATH, json=_body(stream=True, **ENDLESS)) as answer:
            for line in answer.iter_lines():
                if "content_block_delta" in line:
                    break
        assert client.get("/cancelled/1").status_code == 200
        with pytest.raises(httpx.ReadTimeout):
            client.post(PATH, json=_body(**ENDLESS), timeout=0.2)
        assert client.get("/cancelled/2").status_code == 200


@pytest.mark.anyio
async def test_a_client_that_goes_away_before_the_first_event_leaves_nothing() -> None:
    body = json.dumps(_body(stream=True, **ENDLESS)).encode()
    asked = [{"type": "http.request", "body": body, "more_body": False}]
    begun = anyio.Event()

    async def receive() -> Any:
        if asked:
            return asked.pop()
        await begun.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        begun.set()
        await anyio.sleep_forever()

    async with Broker(MODEL, ram="64MiB") as broker:
        service = service_over(broker, ServerSettings())
        app = Starlette(routes=routes(service))
        scope = {"type": "http", "method": "POST", "path": PATH, "headers": [], "query_string": b""}
        await app(scope, receive, send)
        while not await _cancelled(broker):
            await anyio.lowlevel.checkpoint()
        await check_idle(broker)
        assert not service.generator.histories._running


def test_the_table_of_operations_has_every_endpoint() -> None:
    paths = {operation.path for operation in OPERATIONS}
    assert paths == {PATH, f"{PATH}/count_tokens"}


def _events(text: str) -> Iterator[tuple[str, Any]]:
    for part in text.strip().split("\n\n"):
        name, data = part.split("\n")
        yield name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def _cancelled(broker: Broker) -> int:
    events = await inside(broker, lambda engine: engine._recorder.events())
    return sum(isinstance(event, Cancelled) for event in events)
