"""A route of test servers that answers once nothing is left of any request."""

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from mlx_swarm.broker.server.service import Service
from tests.tiny_broker import check_idle

IDLE = "/idle"
PATIENCE = 200


def idle_route(service: Service) -> BaseRoute:
    """`GET /idle`."""

    async def idle(request: Request) -> Response:
        for _ in range(PATIENCE):
            try:
                await check_idle(service.broker)
            except AssertionError:
                await anyio.sleep(0.05)
            else:
                return Response("idle")
        await check_idle(service.broker)
        return Response("idle")

    return Route(IDLE, idle)
