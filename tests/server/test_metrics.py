"""A scrape while the engine is busy is answered with what was known."""

import threading

import httpx
import pytest
from starlette.applications import Starlette

from mlx_swarm.broker.engine.loop import EngineLoop
from mlx_swarm.broker.server.admin import metrics
from mlx_swarm.broker.server.service import service_over
from mlx_swarm.broker.server.settings import ServerSettings
from tests.tiny_broker import request, tiny

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def told(text: str) -> list[str]:
    """What is told of the broker, without what a scrape itself changes."""
    return [line for line in text.splitlines() if line.startswith("mlx_swarm_prompt_tokens_total")]


async def test_a_scrape_does_not_wait_for_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    async with tiny() as broker:
        app = Starlette(routes=metrics.routes(service_over(broker, ServerSettings())))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            await broker.complete(request())
            before = told((await client.get("/metrics")).text)
            assert 'mlx_swarm_prompt_tokens_total{tier="prefilled"} 66.0' in before

            def block(engine: EngineLoop) -> None:
                go.wait(60)

            broker._running().post_from_finaliser(block)
            monkeypatch.setattr(metrics, "PATIENCE_SECONDS", 0.02)
            try:
                response = await client.get("/metrics")
            finally:
                go.set()
            assert response.status_code == 200
            assert told(response.text) == before
            monkeypatch.setattr(metrics, "PATIENCE_SECONDS", 60.0)
            await broker.complete(request())
            assert told((await client.get("/metrics")).text) != before
