"""The batch lane on every kind of cache of stock models: rows of any mix equal solo runs."""

import anyio
import pytest

from mlx_swarm.broker import Broker, Completed
from mlx_swarm.broker.models import LoadedModel
from tests.tiny_broker import SHARED, check_idle, inside, prompt, reference, request, tiny

pytestmark = pytest.mark.anyio

SIZES = "layers=4&hidden=64&heads=4&kv_heads=2&intermediate=64&context=256&seed=3"
ARCHITECTURES = {
    "full attention": f"synthetic:qwen3?{SIZES}",
    "sliding windows": f"synthetic:gemma3_text?{SIZES}&window=16",
    "windows with sinks": f"synthetic:gpt_oss?{SIZES}&window=16",
    "state": "synthetic:mamba2?layers=2&hidden=64&context=256&seed=3",
}


@pytest.fixture
def anyio_backend() -> str:
    """The lane knows no event loop."""
    return "asyncio"


@pytest.mark.parametrize("kind", ARCHITECTURES)
async def test_rows_with_and_without_a_cached_prefix_join_and_equal_their_solo_runs(
    kind: str,
) -> None:
    asked = [request(agent, tokens=prompt(agent, own=2 + 5 * agent)) for agent in range(4)]
    asked += [request(tokens=[5]), request(tokens=[9, 8, 7, 6], cache=False)]
    found: dict[int, Completed] = {}

    async def complete(index: int) -> None:
        found[index] = await broker.complete(asked[index])

    async with Broker(ARCHITECTURES[kind], prefill_chunk=32, ram="64MiB") as broker:
        for _ in range(2):
            async with anyio.create_task_group() as group:
                for index in range(len(asked)):
                    group.start_soon(complete, index)
            expected = await inside(
                broker,
                lambda engine: [reference(engine.model, each.tokens, 8) for each in asked],
            )
            assert [found[index].tokens for index in range(len(asked))] == expected
        await check_idle(broker)
    assert all(found[agent].usage.ram_tokens >= len(SHARED) for agent in range(4))


async def test_more_requests_than_rows_are_served_in_turns() -> None:
    async with tiny(max_rows=2) as broker:
        streams = [broker.stream(request(agent, max_tokens=2 + agent)) for agent in range(7)]
        ends = [[event async for event in stream][-1] for stream in streams]
        await check_idle(broker)
    assert [len(end.tokens) for end in ends if isinstance(end, Completed)] == [*range(2, 9)]


class Unbatchable(Broker):
    """A model whose caches mlx-lm cannot batch with history."""

    def _load(self, progress: object) -> LoadedModel:
        model = super()._load(lambda _: None)
        original = model.make_caches
        model.make_caches = lambda: [cache.to_quantized(group_size=32) for cache in original()]  # type: ignore[method-assign]
        return model


async def test_a_model_whose_caches_cannot_be_batched_is_served_one_row_at_a_time() -> None:
    async with Unbatchable(tiny()._model.replace("hidden=64", "hidden=128")) as broker:
        first, second = [await broker.complete(request(0)) for _ in range(2)]
        assert first.tokens == second.tokens
        assert second.usage.ram_tokens == len(prompt(0)) - 1
        await check_idle(broker)
