"""`mlx-swarm serve` as a process: how it begins, and that it ends in order."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from mlx_swarm.broker import cli
from mlx_swarm.broker.server.http import EventStream
from mlx_swarm.broker.server.service import Service
from mlx_swarm.broker.server.settings import ServerSettings
from tests.server.raw import connection, exchange, head, read_rest
from tests.server.serving import serving
from tests.tiny_broker import TINY

COMMAND = [sys.executable, "-m", "mlx_swarm.broker.cli", "serve"]


@pytest.fixture(params=[signal.SIGTERM, signal.SIGINT])
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal that children do not ignore, as they would in the background."""
    is_interrupt = request.param == signal.SIGINT
    default: Any = signal.default_int_handler if is_interrupt else signal.SIG_DFL
    before = signal.signal(request.param, default)
    yield request.param
    signal.signal(request.param, before)


@contextmanager
def process(*options: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its address."""
    command = [*COMMAND, TINY, "--port", "0", "--ram", "64MiB", *options]
    whole = {**os.environ, **environment}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=whole) as running:
        assert running.stderr is not None
        try:
            found = None
            while found is None:
                line = running.stderr.readline()
                assert line
                found = re.search(r"serving .* at (http://\S+)", line)
            yield running, found[1]
        finally:
            running.kill()


def test_a_signal_ends_it_in_order(number: signal.Signals) -> None:
    with process(MLX_SWARM_API_KEY="sk-secret") as (running, url):
        key = "Authorization: Bearer sk-secret"
        assert exchange(url, head("GET", "/healthz"))[0] == 200
        assert exchange(url, head("GET", "/"))[0] == 401
        assert exchange(url, head("GET", "/", key))[0] == 200
        with connection(url) as idle:
            running.send_signal(number)
            assert read_rest(idle) == b""
        assert running.stderr is not None
        rest = running.stderr.read()
        assert running.wait() == 128 + number
    assert "no new work is taken" in rest
    assert "Traceback" not in rest
    assert "sk-secret" not in rest


def test_a_stream_is_finished_before_the_end_and_nothing_new_is_begun() -> None:
    begun, drained = threading.Event(), threading.Event()

    def routes(service: Service) -> list[BaseRoute]:
        async def frames() -> AsyncIterator[bytes]:
            yield b": begun\n\n"
            begun.set()
            await service.draining.wait()
            drained.set()
            await anyio.to_thread.run_sync(finish.wait)
            yield b"data: [DONE]\n\n"

        async def stream(request: Request) -> Response:
            return EventStream(frames(), ping_seconds=60)

        async def drain(request: Request) -> Response:
            service.draining.start()
            return Response()

        return [
            Route("/stream", stream, methods=["POST"]),
            Route("/drain", drain),
            WebSocketRoute("/ws", _open),
        ]

    finish = threading.Event()
    with serving(routes=routes) as url, connection(url) as client:
        client.sendall(head("POST", "/stream", "Content-Length: 0"))
        assert begun.wait(30)
        with connect(f"{url.replace('http', 'ws')}/ws") as websocket:
            assert websocket.recv() == "open"
            assert exchange(url, head("GET", "/drain"))[0] == 200
            assert drained.wait(30)
            status, headers, body = exchange(url, head("POST", "/stream", "Content-Length: 0"))
            assert (status, headers["retry-after"]) == (503, "2")
            assert b'"code":"draining"' in body
            with pytest.raises(InvalidStatus), connect(f"{url.replace('http', 'ws')}/ws"):
                pass
            finish.set()
            assert read_rest(client).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            with pytest.raises(ConnectionClosed) as closed:
                websocket.recv(timeout=30)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1001


def test_what_is_not_over_in_time_is_ended() -> None:
    ended = threading.Event()

    def routes(service: Service) -> list[BaseRoute]:
        async def frames() -> AsyncIterator[bytes]:
            try:
                yield b": begun\n\n"
                service.draining.start()
                await anyio.sleep_forever()
            finally:
                ended.set()

        async def stream(request: Request) -> Response:
            return EventStream(frames(), ping_seconds=60)

        async def wait(request: Request) -> Response:
            await anyio.sleep_forever()
            return Response()

        return [
            Route("/stream", stream, methods=["POST"]),
            Route("/wait", wait, methods=["POST"]),
        ]

    with serving(routes=routes, settings=ServerSettings(drain_seconds=0.1)) as url:
        with connection(url) as waiting, connection(url) as client:
            waiting.sendall(head("POST", "/wait", "Content-Length: 0"))
            client.sendall(head("POST", "/stream", "Content-Length: 0"))
            last = read_rest(client)
            assert b'"code":"draining"' in last
            assert last.endswith(b"0\r\n\r\n")
            assert b'"code":"draining"' in read_rest(waiting)
        assert ended.wait(30)


async def _open(websocket: WebSocket) -> None:
    await websocket.accept()
    await websocket.send_text("open")
    await anyio.sleep_forever()


def complaint(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The one line that it does not even begin with."""
    assert cli.run(["serve", TINY, *options]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("mlx-swarm: ")
    return line


def test_what_cannot_be_served_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "listens there already" in complaint(capsys, "--port", port)
    nonsense = tmp_path / "cert.pem"
    nonsense.write_text("nonsense")
    assert "no certificate" in complaint(capsys, "--ssl-certfile", str(nonsense))
    assert "cannot be read" in complaint(capsys, "--ssl-certfile", str(tmp_path / "none"))
    assert "needs ssl_certfile" in complaint(capsys, "--ssl-keyfile", str(nonsense))
    assert "--no-auth" in complaint(capsys, "--host", "0.0.0.0")
    assert "no address" in complaint(capsys, "--no-auth", "--host", "no.such.host.invalid")


def test_the_options_that_errors_name_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--allowed-host", "a.example", "--allowed-host", "b.example"]
    given += ["--allowed-origin", "https://a.example", "--api-key-file", "/nowhere/keys"]
    assert "/nowhere/keys cannot be read" in complaint(capsys, *given)
    assert "--alias: 'short' must be NAME=VALUE" in complaint(capsys, "--alias", "short")
    assert "--adapter: 'short'" in complaint(capsys, "--adapter", "short")
    assert "--add-model: 'short'" in complaint(capsys, "--add-model", "short")
