"""How much a client may send, how long it may take, and how many may be there."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from mlx_swarm.broker.server.app import guarded
from mlx_swarm.broker.server.entrance.draining import Draining
from mlx_swarm.broker.server.settings import ServerSettings
from tests.server.raw import connection, error_of, exchange, head, read_response, read_rest
from tests.server.serving import serving_app

SMALL = 1000


async def _size(request: Request) -> Response:
    return JSONResponse(len(await request.body()))


async def _unread(request: Request) -> Response:
    return JSONResponse("unread")


async def _fail(request: Request) -> Response:
    raise ValueError("what a user wrote")


async def _echo(websocket: WebSocket) -> None:
    await websocket.accept()
    await websocket.send_text(await websocket.receive_text())
    await websocket.close()


@contextmanager
def limited(**settings: float) -> Iterator[str]:
    """A server that takes bodies of `SMALL` bytes."""

    def make(chosen: ServerSettings) -> Starlette:
        draining = Draining()
        routes = [
            Route("/", _size, methods=["POST"]),
            Route("/v1/messages", _size, methods=["POST"]),
            Route("/unread", _unread, methods=["POST"]),
            Route("/fail", _fail, methods=["POST"]),
            WebSocketRoute("/ws", _echo),
        ]
        app = guarded(routes, chosen, draining)
        app.state.draining = draining
        return app

    given = {"max_body": SMALL, **settings}
    with serving_app(make, ServerSettings(**given)) as url:  # type: ignore[arg-type]
        yield url


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with limited() as url:
        yield url


def chunked(sizes: list[int], *, end: bool = True) -> bytes:
    chunks = [b"%x\r\n%s\r\n" % (size, b"x" * size) for size in sizes]
    return b"".join(chunks) + (b"0\r\n\r\n" if end else b"")


def post(path: str, body: bytes, *headers: str) -> bytes:
    return head("POST", path, f"Content-Length: {len(body)}", *headers) + body


@pytest.mark.parametrize("size", [0, 1, SMALL])
def test_a_body_of_the_size_that_is_taken_is_taken(url: str, size: int) -> None:
    status, headers, body = exchange(url, post("/", b"x" * size))
    assert (status, body) == (200, b"%d" % size)
    assert headers["x-request-id"].startswith("req_")
    status, _, body = exchange(
        url, head("POST", "/", "Transfer-Encoding: chunked") + chunked([size] if size else [])
    )
    assert (status, body) == (200, b"%d" % size)


def test_a_body_that_says_it_is_too_large_is_refused_before_it_is_sent(url: str) -> None:
    with connection(url) as client:
        client.sendall(head("POST", "/", f"Content-Length: {SMALL + 1}", "Expect: 100-continue"))
        status, _, body = read_response(client)
    assert status == 413
    assert "1,001 bytes" in error_of(body)["message"]


@pytest.mark.parametrize("sizes", [[SMALL + 1], [600, 401], [SMALL, 1]])
def test_a_body_without_a_length_is_refused_as_soon_as_it_is_too_large(
    url: str, sizes: list[int]
) -> None:
    with connection(url) as client:
        unfinished = chunked(sizes, end=False)
        client.sendall(head("POST", "/", "Transfer-Encoding: chunked") + unfinished)
        status, _, body = read_response(client)
        assert status == 413
        assert error_of(body)["code"] == "request_too_large"
        # What is still sent is thrown away, and the connection can be used again.
        client.sendall(chunked([50000]) + post("/", b"abc"))
        assert read_response(client)[2] == b"3"


def test_messages_are_refused_in_the_words_of_their_api(url: str) -> None:
    status, headers, body = exchange(url, post("/v1/messages", b"x" * (SMALL + 1)))
    assert status == 413
    assert b'{"type":"error","error":{"type":"request_too_large",' in body
    assert headers["x-request-id"].encode() in body


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (head("GET", "/" + "x" * 9000), 414),
        (head("GET", "/?" + "x" * 9000), 414),
        (head("GET", "/", "X-Long: " + "x" * 40000), 431),
        (head("GET", "/", "X-Long: " + "x" * 400000), 431),
        (head("GET", "/", *(f"X-{number}: 1" for number in range(200))), 431),
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (head("GET", "/", "Content-Length: -1"), 400),
        (head("GET", "/", "Content-Length: 5", "Content-Length: 6"), 400),
        (head("GET", "/", host=""), 400),
        (head("GET", "/nowhere"), 404),
        (head("DELETE", "/"), 405),
    ],
)
def test_everything_that_is_refused_is_json(url: str, request_: bytes, status: int) -> None:
    with connection(url) as client:
        try:
            client.sendall(request_)
        except ConnectionResetError:
            pass
        found, headers, body = read_response(client)
    assert found == status
    assert headers["content-type"] == "application/json"
    assert error_of(body)["type"] == "invalid_request_error"


def test_what_nobody_foresaw_tells_nobody_what_was_written(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    status, headers, body = exchange(url, post("/fail", b"{}"))
    assert status == 500
    assert error_of(body)["type"] == "server_error"
    assert "user wrote" not in caplog.text + body.decode()
    assert "ValueError" in caplog.text
    assert headers["x-request-id"] in caplog.text


def test_headers_that_do_not_end_are_not_waited_for() -> None:
    with limited(header_seconds=0.3) as url:
        with connection(url) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow")
            status, _, body = read_response(client)
            assert status == 408
            assert "headers" in error_of(body)["message"]
            assert read_rest(client) == b""
        with connection(url) as client:
            assert read_rest(client) == b""


def test_a_body_that_does_not_end_is_not_waited_for() -> None:
    with limited(body_seconds=0.3, header_seconds=0.2) as url:
        with connection(url) as client:
            client.sendall(head("POST", "/", "Content-Length: 10") + b"abc")
            status, _, body = read_response(client)
            assert status == 408
            assert "body" in error_of(body)["message"]
            assert read_rest(client) == b""
        with connection(url) as client:
            client.sendall(head("POST", "/unread", "Content-Length: 10") + b"abc")
            assert read_response(client)[2] == b'"unread"'
            assert read_rest(client) == b""


def test_requests_in_a_row_each_have_their_time() -> None:
    with limited(body_seconds=0.2, header_seconds=0.2) as url, connection(url) as client:
        for _ in range(20):
            client.sendall(head("POST", "/", "Content-Length: 2") + b"a")
            socket_pause(0.01)
            client.sendall(b"b")
            assert read_response(client)[0] == 200


def test_more_connections_than_are_taken_are_told_so() -> None:
    with limited(max_connections=3) as url, ExitStack() as stack:
        held = [stack.enter_context(connection(url)) for _ in range(3)]
        for each in held:
            each.sendall(post("/", b"x"))
            assert read_response(each)[0] == 200
        status, headers, body = exchange(url, post("/", b"x"))
        assert (status, headers["retry-after"]) == (503, "2")
        assert "3 connections" in error_of(body)["message"]
        upgrade = ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"]
        key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
        assert exchange(url, head("GET", "/ws", *upgrade, key))[0] == 503
        held.pop().close()
        while exchange(url, post("/", b"x"))[0] != 200:
            socket_pause(0.01)


def socket_pause(seconds: float) -> None:
    """Wait a little, as a slow client does."""
    left, right = socket.socketpair()
    with left, right:
        left.settimeout(seconds)
        with pytest.raises(TimeoutError):
            left.recv(1)


def test_a_body_whose_end_is_told_in_two_ways_is_refused_and_nothing_after_it_is_read() -> None:
    two_ways = ("Content-Length: 4", "Transfer-Encoding: chunked")
    hidden = head("POST", "/unread", "Content-Length: 0")
    with limited() as url, connection(url) as client:
        client.sendall(head("POST", "/", *two_ways) + b"0\r\n\r\n" + hidden)
        answer = read_rest(client)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"transfer-encoding" in answer
    assert answer.count(b"HTTP/1.1") == 1


def test_what_strangers_send_writes_no_log(caplog: pytest.LogCaptureFixture) -> None:
    upgrade = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13")
    key = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="
    with limited() as url:
        for bad in (b"no http\r\n\r\n", head("GET", "/ws", *upgrade, key, host="evil.example")):
            with connection(url) as client:
                client.sendall(bad)
                assert read_rest(client)
        with connection(url) as client:
            client.sendall(head("GET", "/ws", *upgrade, key))
            assert client.recv(1000).startswith(b"HTTP/1.1 101 ")
            client.sendall(b"\x81\x81\0\0\0\0\xff")
            assert read_rest(client)
    assert [each for each in caplog.records if each.name.startswith("uvicorn")] == []
