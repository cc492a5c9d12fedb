"""Models whose state serves single lengths: what is stored on the way, and what then hits."""

import pytest

from mlx_swarm.broker import Broker
from tests.tiny_broker import SHARED, check_idle, prompt, request

pytestmark = pytest.mark.anyio

SIZES = "hidden=64&context=512&seed=3"
KINDS = {
    "state": f"synthetic:mamba2?layers=2&{SIZES}",
    "state and attention": f"synthetic:lfm2?layers=4&heads=4&kv_heads=2&{SIZES}",
    "sliding windows": f"synthetic:gemma3_text?layers=4&heads=4&kv_heads=2&window=16&{SIZES}",
}


@pytest.fixture
def anyio_backend() -> str:
    """The engine knows no event loop."""
    return "asyncio"


def opened(kind: str) -> Broker:
    """A broker with small chunks that is not open yet."""
    return Broker(KINDS[kind], prefill_chunk=16, ram="64MiB")


@pytest.mark.parametrize("kind", KINDS)
async def test_five_turns_of_a_conversation_hit_five_times(kind: str) -> None:
    async with opened(kind) as broker:
        history = prompt(0)
        hits: list[int] = []
        stored = 0
        for turn in range(6):
            reply = await broker.complete(request(tokens=history, max_tokens=5))
            hits.append(reply.usage.ram_tokens)
            assert hits[-1] >= stored
            stored = len(history) + len(reply.tokens) - 1
            history = [*history, *reply.tokens, *range(20 + turn, 31 + turn)]
        await check_idle(broker)
        statistics = (await broker.statistics()).engine.cache.total
    assert statistics.hits == 5


@pytest.mark.parametrize("kind", KINDS)
async def test_the_second_agent_that_parts_pays_and_the_third_hits(kind: str) -> None:
    """Nobody marks where the instructions end: the second prompt shows it."""
    async with opened(kind) as broker:
        usages = [(await broker.complete(request(agent))).usage for agent in range(3)]
        await check_idle(broker)
    assert usages[0].ram_tokens == 0
    assert usages[2].ram_tokens == len(SHARED)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_marked_boundary_serves_the_second_agent(kind: str) -> None:
    async with opened(kind) as broker:
        asked = [request(agent, boundaries=(len(SHARED),)) for agent in range(2)]
        usages = [(await broker.complete(each)).usage for each in asked]
    assert usages[1].ram_tokens == len(SHARED)
