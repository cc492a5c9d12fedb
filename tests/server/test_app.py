"""The application: what it says of itself, and that its description is true."""

import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import given
from hypothesis import settings as bounded
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import positive_data_acceptance
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from mlx_swarm.broker.request import Request as Prompt
from mlx_swarm.broker.server.admin.health import routes as health_routes
from mlx_swarm.broker.server.service import Service
from tests.server.raw import exchange, head
from tests.server.serving import serving


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as url:
        yield url


def test_what_it_says_of_itself(url: str) -> None:
    status, headers, body = exchange(url, head("GET", "/healthz"))
    assert (status, headers["content-type"]) == (200, "application/json")
    assert msgspec.json.decode(body)["status"] == "ok"
    _, _, body = exchange(url, head("GET", "/"))
    assert {"/healthz", "/openapi.json"} <= set(msgspec.json.decode(body)["endpoints"])
    with urllib.request.urlopen(urllib.request.Request(url, method="HEAD")) as answer:
        assert (answer.status, answer.read()) == (200, b"")


def test_no_two_requests_have_the_same_name(url: str) -> None:
    names = {
        exchange(url, head("GET", path))[1]["x-request-id"] for path in "/ /healthz /x".split()
    }
    assert len(names) == 3


def test_the_description_is_true(url: str) -> None:
    """Bounded examples of every operation: documented statuses and bodies, and no 500.

    That a body fits its schema does not mean that it can be served: a 400 is documented for it.
    """
    with urllib.request.urlopen(f"{url}/openapi.json") as answer:
        document = msgspec.json.decode(answer.read())
    schema = schemathesis.openapi.from_dict(document)
    operations = [each.ok() for each in schema.get_all_operations() if isinstance(each, Ok)]
    assert {each.path for each in operations} == set(document["paths"])
    for operation in operations:

        @bounded(max_examples=3, deadline=None, database=None, derandomize=True)
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            case.call_and_validate(base_url=url, excluded_checks=[positive_data_acceptance])

        check()


def test_health_does_not_wait_for_a_long_prompt() -> None:
    ended = threading.Event()

    def with_a_prompt(service: Service) -> list[BaseRoute]:
        async def compute(request: Request) -> Response:
            tokens = [number % 200 + 10 for number in range(2500)]
            await service.broker.complete(Prompt(tokens=tokens, max_tokens=1))
            ended.set()
            return Response()

        return [*health_routes(service), Route("/compute", compute, methods=["POST"])]

    model = "synthetic:llama?layers=4&hidden=128&heads=4&context=8192"
    with serving(model, routes=with_a_prompt, ram="1GiB", prefill_chunk=8192) as url:
        request = urllib.request.Request(f"{url}/compute", b"")
        computing = threading.Thread(target=lambda: urllib.request.urlopen(request).close())
        computing.start()
        answered = 0
        while not ended.is_set() and answered < 3:
            assert exchange(url, head("GET", "/healthz"))[0] == 200
            answered += not ended.is_set()
        computing.join()
    assert answered == 3
