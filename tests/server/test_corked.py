"""Frames that leave together: everything, in order, and closing loses nothing."""

import asyncio
from typing import Any, cast

import pytest
from uvicorn.server import ServerState
from websockets.client import ClientProtocol
from websockets.uri import parse_uri

from mlx_swarm.broker.server.entrance.connections import Config
from mlx_swarm.broker.server.entrance.corked import (
    MOST_BYTES,
    MOST_READ_BYTES,
    CorkedProtocol,
    CorkedTransport,
)
from mlx_swarm.broker.server.settings import ServerSettings

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Transport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        assert not self.is_closed
        self.writes.append(data)

    def close(self) -> None:
        self.is_closed = True

    def get_write_buffer_size(self) -> int:
        return 3

    def get_extra_info(self, name: str) -> None:
        return None

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def corked() -> tuple[Transport, CorkedTransport]:
    transport = Transport()
    loop = asyncio.get_running_loop()
    return transport, CorkedTransport(cast(Any, transport), loop)


async def test_what_is_written_in_one_turn_of_the_loop_is_one_write() -> None:
    transport, cork = corked()
    for data in (b"a", b"b", b"c"):
        cork.write(data)
    assert transport.writes == []
    assert cork.get_write_buffer_size() == 6
    await asyncio.sleep(0)
    assert transport.writes == [b"abc"]
    cork.write(b"d")
    await asyncio.sleep(0)
    assert transport.writes == [b"abc", b"d"]


async def test_much_is_written_at_once_and_closing_loses_nothing() -> None:
    transport, cork = corked()
    cork.write(b"x" * (MOST_BYTES + 1))
    assert len(transport.writes) == 1
    cork.write(b"last")
    cork.close()
    assert transport.writes[1:] == [b"last"]
    assert transport.is_closed
    await asyncio.sleep(0)
    assert cork.is_closed


async def settle() -> None:
    """Let everything happen that does not wait for something outside."""
    for _ in range(20):
        await asyncio.sleep(0)


class Connected:
    """Both ends of a WebSocket whose messages an application gets as `received`."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.transport = Transport()
        self.client = ClientProtocol(parse_uri("ws://localhost/"))
        config = Config(cast(Any, self._app), ServerSettings(), interface="asgi3")
        self.protocol = CorkedProtocol(config, ServerState(), {})
        self.protocol.connection_made(cast(Any, self.transport))

    async def open(self) -> None:
        self.client.send_request(self.client.connect())
        self.pass_on()
        await settle()
        self.client.receive_data(b"".join(self.transport.writes))
        self.transport.writes.clear()

    def pass_on(self) -> None:
        """Give the server what the client sends."""
        self.protocol.data_received(b"".join(self.client.data_to_send()))

    async def close(self) -> None:
        self.protocol.connection_lost(None)
        await settle()
        assert not self.protocol.tasks

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            self.received.append(message)


async def test_pings_of_a_client_that_does_not_read_take_no_memory() -> None:
    both = Connected()
    await both.open()
    both.client.send_ping(b"first")
    both.pass_on()
    await asyncio.sleep(0)
    assert both.transport.writes == [b"\x8a\x05first"]
    both.protocol.pause_writing()
    for number in range(100):
        both.client.send_ping(str(number).encode())
    both.pass_on()
    await asyncio.sleep(0)
    assert len(both.transport.writes) == 1
    both.protocol.resume_writing()
    both.client.send_ping(b"last")
    both.pass_on()
    await asyncio.sleep(0)
    assert both.transport.writes[1:] == [b"\x8a\x04last"]
    await both.close()


async def test_a_message_of_any_number_of_frames_takes_its_own_memory_alone() -> None:
    both = Connected()
    await both.open()
    both.client.send_text(b"[1,", fin=False)
    for _ in range(1000):
        both.client.send_continuation(b"", fin=False)
    both.client.send_continuation("ü".encode()[:1], fin=False)
    both.pass_on()
    assert len(both.protocol.frames) == 1
    both.client.send_continuation("ü".encode()[1:] + b"]", fin=True)
    both.pass_on()
    await settle()
    assert both.received == [{"type": "websocket.receive", "text": "[1,ü]"}]
    await both.close()


async def test_little_is_read_at_once() -> None:
    both = Connected()
    assert both.transport.max_size == MOST_READ_BYTES  # type: ignore[attr-defined]
    await both.close()
