"""`/v1/cache/warm` for a client that goes away: what nobody waits for is not computed."""

import anyio
import msgspec
import pytest

from mlx_swarm.broker.trace.events import Cancelled, Queued
from tests.server.raw import head
from tests.server.sockets import running

pytestmark = pytest.mark.anyio

CONTEXT = "synthetic:llama?layers=1&hidden=32&heads=2&intermediate=64&context=4096&seed=3"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_prompt_whose_client_has_gone_is_not_computed_to_its_end() -> None:
    body = msgspec.json.encode({"text": "a" * 4000})
    async with running(CONTEXT, prefill_chunk=1) as server:
        events = server.service.broker.recorder.events
        async with await anyio.connect_tcp("127.0.0.1", server.port) as client:
            request = head("POST", "/v1/cache/warm", f"Content-Length: {len(body)}") + body
            await client.send(request)
            while True:
                await anyio.sleep(0.01)
                if any(isinstance(event, Queued) for event in events()):
                    break
        await server.check_idle()
        assert any(isinstance(event, Cancelled) for event in events())
