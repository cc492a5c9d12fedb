"""A real server on a free port of this machine, for as long as a context is open."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from anyio.abc import TaskStatus
from anyio.from_thread import start_blocking_portal
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.routing import BaseRoute

from mlx_swarm.broker import Broker
from mlx_swarm.broker.server.app import create_app, guarded
from mlx_swarm.broker.server.entrance.draining import Draining
from mlx_swarm.broker.server.entrance.listening import listen
from mlx_swarm.broker.server.serve import Server
from mlx_swarm.broker.server.service import Service, service_over
from mlx_swarm.broker.server.settings import ServerSettings
from tests.tiny_broker import TINY

SMOLLM2 = "smollm2-135m"


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
    chosen = replace(settings or ServerSettings(), port=0)

    async def serve(*, task_status: TaskStatus[tuple[str, Draining]]) -> None:
        async with Broker(model, **{"ram": "64MiB", **broker}) as opened:
            app = _application(opened, chosen, routes)
            await serve_app(app, chosen, task_status)

    with _running(serve) as url:
        yield url


@contextmanager
def serving_app(
    make: Callable[[ServerSettings], Starlette], settings: ServerSettings | None = None
) -> Iterator[str]:
    """The address of a server over any application that has a `Draining` in its state."""
    chosen = replace(settings or ServerSettings(), port=0)

    async def serve(*, task_status: TaskStatus[tuple[str, Draining]]) -> None:
        await serve_app(make(chosen), chosen, task_status)

    with _running(serve) as url:
        yield url


async def serve_app(
    app: Starlette, settings: ServerSettings, task_status: TaskStatus[tuple[str, Draining]]
) -> None:
    """Serve an application until its `Draining` is over."""
    service = getattr(app.state, "service", None)
    draining: Draining = app.state.draining if service is None else service.draining
    sockets = listen(settings)
    try:
        server = Server(app, settings, sockets, lambda url: task_status.started((url, draining)))
        await server.run_until_drained(draining)
    finally:
        for each in sockets:
            each.close()


@contextmanager
def _running(serve: Callable[..., Any]) -> Iterator[str]:
    with start_blocking_portal() as portal:
        future, (url, draining) = portal.start_task(serve)
        try:
            yield url
        finally:
            portal.call(draining.stop)
            future.result()


def _application(
    broker: Broker,
    settings: ServerSettings,
    routes: Callable[[Service], Sequence[BaseRoute]] | None,
) -> Starlette:
    if routes is None:
        return create_app(broker, settings)
    service = service_over(broker, settings)
    app = guarded(routes(service), service.settings, service.draining)
    app.state.service = service
    return app
