"""Very many lanes, and clients that drop: `pytest tests/server/soak_socket.py`, a minute."""

import random

import anyio
import pytest

from mlx_swarm.broker.server.settings import ServerSettings
from tests.server.sockets import ENDS, create, hear, running

pytestmark = [pytest.mark.anyio, pytest.mark.soak, pytest.mark.timeout(1200)]

LANES = 10_000
DROPS = 2_000


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_ten_thousand_lanes_one_after_another() -> None:
    async with (
        running(settings=ServerSettings(max_lanes=64)) as server,
        server.connect(max_queue=None) as client,
    ):
        ended = 0
        for number in range(LANES):
            await create(client, stream_id=str(number), generate=False)
            while number - ended >= 32 or (number == LANES - 1 and ended < LANES):
                event = await hear(client)
                assert event["type"] != "error", event
                ended += event["type"] in ENDS


async def test_thousands_of_clients_that_drop() -> None:
    async with running(max_rows=8) as server:

        async def come_and_go(chance: random.Random) -> None:
            for _ in range(DROPS // 20):
                client = await server.connect()
                try:
                    for lane in range(chance.randrange(4)):
                        await create(client, stream_id=str(lane), max_output_tokens=60)
                    with anyio.move_on_after(chance.random() * 0.05):
                        while True:
                            await hear(client)
                finally:
                    client.transport.abort()

        async with anyio.create_task_group() as tasks:
            for seed in range(20):
                tasks.start_soon(come_and_go, random.Random(seed))
