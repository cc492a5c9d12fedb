"""Frames that leave together: everything, in order, and closing loses nothing."""

import asyncio
from typing import Any, cast

import pytest

from mlx_swarm.broker.server.corked import MOST_BYTES, CorkedTransport

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
