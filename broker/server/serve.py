"""A server from its first socket to its end in order."""

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio
import uvicorn
from starlette.applications import Starlette

from ..broker import Broker
from .entrance.connections import Config, Watchdog
from .entrance.draining import Draining
from .entrance.listening import address
from .settings import Adapter, ServerSettings

CLOSING_SECONDS = 2
"""So long turns that are cut may take to tell their clients, and as long again what has been
written to reach them."""


class Server(uvicorn.Server):
    """uvicorn under somebody else's signals; `started` at `address` it calls `ready`."""

    def __init__(
        self,
        app: Starlette,
        settings: ServerSettings,
        sockets: list[socket.socket],
        ready: Callable[[str], None],
    ) -> None:
        super().__init__(Config(app, settings, timeout_graceful_shutdown=CLOSING_SECONDS))
        self._settings = settings
        self._sockets = sockets
        self._ready = ready

    async def run_until_drained(self, draining: Draining) -> None:
        """Serve until `draining` starts, then until what runs is over or its time is."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Watchdog(self.server_state, self._settings).run)
            tasks.start_soon(self._end, draining)
            await self.serve(self._sockets)
            tasks.cancel_scope.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections."""
        await super().startup(sockets)
        self._ready(address(self._sockets, self._settings))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    async def _end(self, draining: Draining) -> None:
        await draining.wait()
        with anyio.move_on_after(self._settings.drain_seconds):
            await draining.wait_idle()
        draining.cut()
        with anyio.move_on_after(CLOSING_SECONDS):
            await draining.wait_idle()
        draining.stop()
        # It reports each request that is cut short as an error.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self.should_exit = True


async def load_all(broker: Broker, settings: ServerSettings) -> None:
    """Load what is to be served besides the first model, which goes by what it was asked for as."""
    if settings.model != broker.model_name:
        await broker.alias(settings.model, broker.model_name)
    for name, model in settings.models.items():
        await broker.load(model, name=name)
    for name, adapter in settings.adapters.items():
        chosen = Adapter(adapter) if isinstance(adapter, str) else adapter
        await broker.load_adapter(chosen.path, name=name, base=chosen.base)
    for name, existing in settings.aliases.items():
        await broker.alias(name, existing)
