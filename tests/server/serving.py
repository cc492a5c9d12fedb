"""A real server on a free port of this machine, for as long as a context is open."""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import anyio
import uvicorn
from anyio.abc import TaskStatus
from anyio.from_thread import start_blocking_portal
from starlette.applications import Starlette
from starlette.routing import BaseRoute

from mlx_swarm.broker import Broker
from mlx_swarm.broker.server.app import create_app
from mlx_swarm.broker.server.service import Service, service_over
from mlx_swarm.broker.server.settings import ServerSettings
from tests.tiny_broker import TINY

SMOLLM2 = "smollm2-135m"


class Server(uvicorn.Server):
    """One that says when it is `ready`."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = anyio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


@contextmanager
def serving(
    model: str = TINY,
    *,
    settings: ServerSettings | None = None,
    routes: Callable[[Service], Sequence[BaseRoute]] | None = None,
    **broker: Any,
) -> Iterator[str]:
    """The address of a server over `model`, such as http://127.0.0.1:40123.

    It serves the whole application, or with `routes` these alone. `broker` are a `Broker`'s.
    """

    async def serve(*, task_status: TaskStatus[str]) -> None:
        async with Broker(model, **{"ram": "64MiB", **broker}) as opened:
            chosen = settings or ServerSettings()
            app = _application(opened, chosen, routes)
            config = uvicorn.Config(app, port=0, log_level="warning", lifespan="off")
            server = Server(config)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(server.serve)
                try:
                    await server.ready.wait()
                    port = server.servers[0].sockets[0].getsockname()[1]
                    task_status.started(f"http://127.0.0.1:{port}")
                    await anyio.sleep_forever()
                finally:
                    server.force_exit = True
                    with anyio.CancelScope(shield=True):
                        await server.shutdown()

    with start_blocking_portal() as portal:
        future, url = portal.start_task(serve)
        try:
            yield url
        finally:
            future.cancel()


def _application(
    broker: Broker,
    settings: ServerSettings,
    routes: Callable[[Service], Sequence[BaseRoute]] | None,
) -> Starlette:
    if routes is None:
        return create_app(broker, settings)
    return Starlette(routes=list(routes(service_over(broker, settings))))
