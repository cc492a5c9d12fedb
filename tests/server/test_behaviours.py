"""Faults that users of other servers met, each by what must happen here instead."""

import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from mlx_swarm.broker.server.admin import cache_admin, health
from mlx_swarm.broker.server.chat import routes as chat
from mlx_swarm.broker.server.completions import routes as completions
from mlx_swarm.broker.server.responses import socket as responses_socket
from mlx_swarm.broker.server.service import Service
from tests.server.idle import IDLE, PATIENCE, idle_route
from tests.server.raw import connection, head
from tests.server.serving import serving

MODEL = "synthetic:llama?layers=2&hidden=64&heads=4&kv_heads=2&intermediate=128&context=8192&seed=3"
LONG = [(7 * at) % 200 + 10 for at in range(1500)]
PREFILLING = "/prefilling"
ENDLESS: dict[str, Any] = {"max_tokens": 4000, "min_tokens": 4000}
RUNS: dict[str, Any] = {"stream": True, "max_tokens": 100, "min_tokens": 100}


def _routes(service: Service) -> Sequence[BaseRoute]:
    surfaces: tuple[Any, ...] = (health, chat, completions, cache_admin, responses_socket)

    async def prefilling(request: Request) -> Response:
        for _ in range(PATIENCE):
            if (await service.broker.statistics()).engine.requests.prefilling:
                return Response()
            await anyio.sleep(0.01)
        return Response(status_code=503)

    extra = [idle_route(service), Route(PREFILLING, prefilling)]
    return [*(route for each in surfaces for route in each.routes(service)), *extra]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(MODEL, routes=_routes, prefill_chunk=16, max_rows=4) as url:
        yield url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    """A client of a server whose cache is empty; it leaves nothing running."""
    with httpx.Client(base_url=url, timeout=60) as client:
        client.delete("/v1/cache").raise_for_status()
        yield client
        assert client.get(IDLE).text == "idle"


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    """What is answered."""
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(http: httpx.Client, tokens: Sequence[int]) -> int:
    """How many tokens of a prompt are in memory."""
    found: int = post(http, "/v1/cache/plan", tokens=tokens)["ram_tokens"]
    return found


def leave(http: httpx.Client, *, after: int, meanwhile: str = "", **body: Any) -> None:
    """Ask for a completion, and be gone after so many bytes of the answer, and of another path."""
    request = http.build_request("POST", "/v1/completions", json={"temperature": 0, **body})
    data = request.read()
    with connection(str(http.base_url)) as opened:
        opened.sendall(head("POST", "/v1/completions", f"Content-Length: {len(data)}") + data)
        found = 0
        while found < after:
            found += len(opened.recv(64))
        if meanwhile:
            http.get(meanwhile).raise_for_status()


def test_12_a_volatile_beginning_is_named_with_both_texts(http: httpx.Client) -> None:
    rest = ". You are one of many." * 3
    post(http, "/v1/cache/warm", text=f"It is 10:41{rest}")
    plan = post(http, "/v1/cache/plan", text=f"It is 10:42{rest}")
    assert plan["reason"] == "diverged"
    divergence = plan["divergence"]
    assert divergence["index"] == plan["ram_tokens"] == len("It is 10:4")
    assert (divergence["stored_text"], divergence["wanted_text"]) == ("1", "2")


def test_13_what_is_streamed_is_stored_as_what_is_not(http: httpx.Client) -> None:
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Name a sea."}],
        "max_tokens": 12,
        "temperature": 0,
    }
    stored = []
    for stream in (True, False):
        http.delete("/v1/cache").raise_for_status()
        http.post("/v1/chat/completions", json={**asked, "stream": stream}).raise_for_status()
        assert http.get(IDLE).text == "idle"
        spaces = http.get("/v1/cache").json()["data"]
        stored.append([(each["tokens"], each["bytes"]) for each in spaces if each["tokens"]])
    assert stored[0] == stored[1] != []


def test_21_an_identical_resend_joins_the_prefill_that_runs(http: httpx.Client) -> None:
    asked: dict[str, Any] = {"prompt": LONG, "max_tokens": 1}
    with ThreadPoolExecutor() as threads:
        first = threads.submit(post, http, "/v1/completions", **asked)
        http.get(PREFILLING).raise_for_status()
        second = post(http, "/v1/completions", **asked)
        replies = first.result(), second
    found = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in replies]
    assert found == [0, len(LONG) - 1]


@pytest.mark.parametrize("stream", [True, False])
def test_32_who_leaves_while_the_prompt_is_computed_stops_it_and_finds_that_part_again(
    http: httpx.Client, stream: bool
) -> None:
    leave(http, after=0, meanwhile=PREFILLING, prompt=LONG, stream=stream, max_tokens=1)
    assert http.get(IDLE).text == "idle"
    kept = cached(http, LONG)
    assert 0 < kept < len(LONG) - 1
    again = post(http, "/v1/completions", prompt=LONG, max_tokens=1)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= kept


@pytest.mark.parametrize("stream", [True, False])
def test_32_who_leaves_while_waiting_or_written_for_is_not_worked_for(
    http: httpx.Client, stream: bool
) -> None:
    for number in range(8):  # of which four run
        leave(http, after=0, prompt=[number + 5] * 20, stream=stream, **ENDLESS)
    leave(http, after=2000, prompt=[3] * 20, stream=True, **ENDLESS)
    assert http.get(IDLE).text == "idle"


def test_33_wherever_a_request_is_left_nothing_stays_leased(http: httpx.Client) -> None:
    for number in range(24):
        prompt = LONG[: 40 + 20 * (number % 5)]
        leave(http, after=0 if number % 3 else 40 * number, prompt=prompt, stream=True, **ENDLESS)
    assert http.get(IDLE).text == "idle"  # it checks that leases are 0 and that the sums are right


def test_34_what_an_abandoned_request_computed_changes_no_reply(http: httpx.Client) -> None:
    asked: dict[str, Any] = {"prompt": LONG[:400], "max_tokens": 8, "temperature": 0}
    alone = post(http, "/v1/completions", **asked)["choices"][0]["text"]
    http.delete("/v1/cache").raise_for_status()
    for after in (0, 1, 0, 600):
        leave(http, after=after, stream=True, **{**asked, **ENDLESS})
        assert post(http, "/v1/completions", **asked)["choices"][0]["text"] == alone


def test_only_who_comes_past_the_long_queue_is_told_to_come_again() -> None:
    with (
        serving(MODEL, routes=_routes, max_rows=1, max_queue=1) as url,
        httpx.Client(base_url=url, timeout=60) as http,
        http.stream(
            "POST", "/v1/completions", json={"prompt": [5], **ENDLESS, "stream": True}
        ) as a,
        http.stream(
            "POST", "/v1/completions", json={"prompt": [6], **ENDLESS, "stream": True}
        ) as b,
    ):
        assert (a.status_code, b.status_code) == (200, 200)
        refused = http.post("/v1/completions", json={"prompt": [7]})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"


def test_35_what_has_no_memory_fails_alone_and_the_server_lives() -> None:
    with (
        serving(MODEL, routes=_routes, ram="1MiB", memory="4MiB") as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        with http.stream("POST", "/v1/completions", json={"prompt": [5] * 9, **RUNS}) as running:
            lines = running.iter_lines()
            next(lines)
            failed = http.post("/v1/completions", json={"prompt": [7] * 8000, "max_tokens": 9})
            assert failed.status_code >= 400
            assert "MiB" in failed.json()["error"]["message"]
            assert http.get("/healthz").status_code == 200
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert http.get(IDLE).text == "idle"


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"origin": "http://evil.example"}, b"--allowed-origin"),
        ({"host": "evil.example"}, b"--allowed-host"),
    ],
)
def test_47_a_page_of_another_site_gets_no_socket(
    url: str, options: dict[str, str], flag: bytes
) -> None:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 0)) as opened:
        address = f"ws://{options.get('host', parts.netloc)}/v1/responses"
        origin: Any = options.get("origin")
        with pytest.raises(InvalidStatus) as refused, connect(address, sock=opened, origin=origin):
            pass
    assert refused.value.response.status_code == 403
    assert flag in (refused.value.response.body or b"")
