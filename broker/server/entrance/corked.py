"""WebSockets whose frames leave together: one write for all that are sent in one turn of the loop.

A write of its own for each frame costs a system call, and in it Python's lock, which the engine's
thread takes meanwhile. That is most of what a short frame costs.

Frames that come are the client's choice: they may be tiny, empty, and very many. None of that may
cost more memory than a message may have, or keep the loop from others.
"""

import asyncio
from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

MOST_BYTES = 64 << 10
"""So much is written at once, lest a client that does not read is noticed too late."""


MOST_READ_BYTES = 4 << 10
"""So much is read at once: hundreds of the shortest frames, which take some milliseconds."""


class CorkedProtocol(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol over a corked transport. To be given as `ws`."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection."""
        # How asyncio's own transports call it; others have no such bound.
        transport.max_size = MOST_READ_BYTES  # type: ignore[attr-defined]
        corked = CorkedTransport(cast(asyncio.Transport, transport), self.loop)
        super().connection_made(cast(asyncio.Transport, corked))

    def handle_cont(self, event: Frame) -> None:
        """Take a further part of a message, of which there may be any number, into one buffer."""
        whole = self.frames[0]
        if not isinstance(whole, bytearray):
            self.frames[0] = whole = bytearray(whole)  # type: ignore[assignment, call-overload]
        whole += event.data
        if event.fin:
            self.send_receive_event_to_app()

    def handle_ping(self) -> None:
        """Answer a ping, unless so much waits for the client already that it cannot be reading."""
        answers = self.conn.data_to_send()
        if self.writable.is_set():
            self.transport.write(b"".join(answers))


class CorkedTransport:
    """Gathers what is written until the loop's next turn. All else is the transport's own."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._waiting: list[bytes] = []
        self._bytes = 0

    def write(self, data: bytes) -> None:
        """Have data written soon, after what was written before."""
        if not self._waiting:
            self._loop.call_soon(self.flush)
        self._waiting.append(data)
        self._bytes += len(data)
        if self._bytes > MOST_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if self._waiting:
            data = b"".join(self._waiting)
            self._waiting.clear()
            self._bytes = 0
            self._transport.write(data)

    def close(self) -> None:
        """Close the connection once everything has been written."""
        self.flush()
        self._transport.close()

    def get_write_buffer_size(self) -> int:
        """How many bytes wait."""
        return self._bytes + self._transport.get_write_buffer_size()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
