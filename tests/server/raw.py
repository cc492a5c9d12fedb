"""A connection of bytes to a server: what well-behaved clients never send."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec

SECONDS = 30.0


@contextmanager
def connection(url: str, *, small: bool = False) -> Iterator[socket.socket]:
    """A connection to a server; with `small` it has hardly any room for what is not read."""
    parts = urlsplit(url)
    with socket.socket() as opened:
        if small:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        opened.settimeout(SECONDS)
        opened.connect((parts.hostname, parts.port))
        yield opened


def head(method: str = "GET", path: str = "/", *headers: str, host: str = "localhost") -> bytes:
    """The beginning of a request."""
    lines = [f"{method} {path} HTTP/1.1", *([f"Host: {host}"] if host else []), *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def read_rest(opened: socket.socket) -> bytes:
    """Everything until the server closes, however it does."""
    found = b""
    try:
        while data := opened.recv(65536):
            found += data
    except ConnectionResetError:
        pass
    return found


def exchange(url: str, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send bytes; status, headers and body of the one response that comes."""
    with connection(url) as opened:
        opened.sendall(data)
        return read_response(opened)


def read_response(opened: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """The next response, which must have a length."""
    found = b""
    while b"\r\n\r\n" not in found:
        data = opened.recv(65536)
        assert data, found
        found += data
    top, _, body = found.partition(b"\r\n\r\n")
    first, *lines = top.decode("latin-1").split("\r\n")
    headers = {key.lower(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    while len(body) < int(headers.get("content-length", "0")):
        data = opened.recv(65536)
        assert data, body
        body += data
    return int(first.split()[1]), headers, body


def error_of(body: bytes) -> Any:
    """The error in a body of OpenAI's form."""
    error = msgspec.json.decode(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
