"""Answers over HTTP: streams that end in order, and work that ends with its client."""

import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlx_swarm.broker.server.app import guarded
from mlx_swarm.broker.server.entrance.draining import Draining
from mlx_swarm.broker.server.http import EventStream, Gone, frame, unless_gone
from mlx_swarm.broker.server.settings import ServerSettings
from tests.server.raw import connection, head, read_rest
from tests.server.serving import serving_app

Endpoint = Callable[[Request], Awaitable[Response]]
Message = MutableMapping[str, Any]


@contextmanager
def answering(endpoint: Endpoint, settings: ServerSettings | None = None) -> Iterator[str]:
    """A server with one endpoint at `/`."""

    def make(chosen: ServerSettings) -> Starlette:
        draining = Draining()
        app = guarded([Route("/", endpoint, methods=["GET", "POST"])], chosen, draining)
        app.state.draining = draining
        return app

    with serving_app(make, settings) as url:
        yield url


class Watched:
    """Frames that say in which task they began and ended."""

    def __init__(self, frames: Callable[[], AsyncIterator[bytes]]) -> None:
        self._frames = frames
        self.sent = 0
        self.ended = threading.Event()
        self.same_task = False

    async def frames(self) -> AsyncIterator[bytes]:
        began = anyio.get_current_task().id
        try:
            # A scope of its own fails where it is left in another task than it was entered in.
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anyio.sleep, 0)
                async for each in self._frames():
                    yield each
                    self.sent += 1
        finally:
            self.same_task = anyio.get_current_task().id == began
            self.ended.set()

    def stream(self, ping_seconds: float = 60.0) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            return EventStream(self.frames(), ping_seconds=ping_seconds)

        return endpoint

    def check(self) -> None:
        assert self.ended.wait(30)
        assert self.same_task


async def three() -> AsyncIterator[bytes]:
    for number in range(3):
        yield frame({"n": number}, "count")


async def silent() -> AsyncIterator[bytes]:
    yield b": begun\n\n"
    await anyio.sleep_forever()


async def endless() -> AsyncIterator[bytes]:
    while True:
        yield b"data: %s\n\n" % (b"x" * 32768)


def test_a_stream_is_sent_whole_and_closed() -> None:
    watched = Watched(three)
    with answering(watched.stream()) as url, connection(url) as client:
        client.sendall(head("GET", "/", "Connection: close"))
        answer = read_rest(client)
    assert b"content-type: text/event-stream" in answer
    assert b"content-length" not in answer
    assert answer.count(b'event: count\ndata: {"n":') == 3
    assert answer.endswith(b"0\r\n\r\n")
    watched.check()


def test_a_silent_stream_is_pinged() -> None:
    watched = Watched(silent)
    with answering(watched.stream(0.01)) as url, connection(url) as client:
        client.sendall(head())
        found = b""
        while found.count(b": ping\n\n") < 3:
            found += client.recv(4096)
    watched.check()


def test_a_client_that_goes_away_ends_its_stream() -> None:
    watched = Watched(silent)
    with answering(watched.stream()) as url:
        with connection(url) as client:
            client.sendall(head())
            while b"begun" not in client.recv(4096):
                pass
        watched.check()


def test_a_client_that_goes_away_while_it_does_not_read_ends_its_stream() -> None:
    watched = Watched(endless)
    with answering(watched.stream()) as url:
        with connection(url, small=True) as client:
            client.sendall(head())
            client.recv(100)
            _wait_until_stuck(watched)
        watched.check()


def test_a_client_that_does_not_read_holds_up_only_itself_and_not_for_ever() -> None:
    watched = Watched(endless)
    settings = ServerSettings(stall_seconds=0.5)
    with answering(watched.stream(), settings) as url:
        with connection(url, small=True) as client:
            client.sendall(head())
            watched.check()
            assert watched.sent * 32768 < 32 << 20
            assert len(read_rest(client)) < 32 << 20


def test_a_stream_that_fails_is_cut_short(caplog: pytest.LogCaptureFixture) -> None:
    async def failing() -> AsyncIterator[bytes]:
        yield b": begun\n\n"
        raise ValueError("what a user wrote")

    watched = Watched(failing)
    with answering(watched.stream()) as url, connection(url) as client:
        client.sendall(head())
        answer = read_rest(client)
    assert b"begun" in answer
    assert not answer.endswith(b"0\r\n\r\n")
    assert "ExceptionGroup" in caplog.text or "ValueError" in caplog.text
    assert "what a user wrote" not in caplog.text
    watched.check()


def _wait_until_stuck(watched: Watched) -> None:
    """Wait until nothing more is sent."""
    before = -1
    pause = threading.Event()
    while watched.sent != before:
        before = watched.sent
        pause.wait(0.2)


def _request(messages: list[Message]) -> Request:
    """A request whose client sends some messages and then nothing."""

    async def receive() -> Message:
        if messages:
            return messages.pop(0)
        await anyio.sleep_forever()
        raise AssertionError

    return Request({"type": "http", "headers": [], "method": "POST"}, receive)


DISCONNECT: list[Message] = [{"type": "http.request", "body": b"late"}, {"type": "http.disconnect"}]


@pytest.mark.anyio
async def test_work_comes_back_with_its_result() -> None:
    async def work() -> int:
        await anyio.lowlevel.checkpoint()
        return 7

    assert await unless_gone(_request([]), work) == 7


@pytest.mark.anyio
async def test_what_work_raises_comes_out_as_it_is() -> None:
    async def work() -> None:
        await anyio.lowlevel.checkpoint()
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        await unless_gone(_request([]), work)


@pytest.mark.anyio
async def test_work_is_cancelled_when_its_client_goes_away() -> None:
    ended = []

    async def work() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(True)

    with pytest.raises(Gone):
        await unless_gone(_request(list(DISCONNECT)), work)
    assert ended


@pytest.mark.anyio
async def test_cancelling_from_outside_is_no_client_that_has_gone() -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        await unless_gone(_request([]), anyio.sleep_forever)
    assert scope.cancelled_caught


def test_work_ends_with_its_client_on_a_real_connection() -> None:
    began, ended = threading.Event(), threading.Event()

    async def work() -> None:
        began.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()

    async def endpoint(request: Request) -> Response:
        await request.body()
        await unless_gone(request, work)
        raise AssertionError

    with answering(endpoint) as url:
        with connection(url) as client:
            client.sendall(head("POST", "/", "Content-Length: 2") + b"{}")
            assert began.wait(30)
            client.shutdown(socket.SHUT_RDWR)
        assert ended.wait(30)
