"""A broker over a tiny random model, and a look inside it."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mlx_lm.generate import stream_generate

from mlx_swarm.broker import Broker, Request
from mlx_swarm.broker.engine.loop import EngineLoop
from mlx_swarm.broker.models import LoadedModel

Result = TypeVar("Result")

TINY = "synthetic:llama?layers=2&hidden=64&heads=4&kv_heads=2&intermediate=128&context=256&seed=3"
VOCABULARY = 259
SHARED = [(7 * at) % 200 + 10 for at in range(60)]


def tiny(**settings: Any) -> Broker:
    """A broker that is not open yet."""
    return Broker(TINY, **{"prefill_chunk": 16, "ram": "64MiB", **settings})


async def inside(broker: Broker, look: Callable[[EngineLoop], Result]) -> Result:
    """What `look` returns for the engine, in its thread."""
    return await broker._running().call(look)


async def check_idle(broker: Broker) -> None:
    """Assert that nothing is left of any request: no row, no lease, no place in the batch."""
    await inside(broker, lambda engine: engine.check_integrity())
    statistics = (await broker.statistics()).engine
    assert not any(
        (
            statistics.requests.queued,
            statistics.requests.waiting,
            statistics.requests.prefilling,
            statistics.requests.decoding,
            statistics.cache.leases,
        )
    )
    assert await inside(broker, lambda engine: len(engine.lane.running)) == 0


def reference(model: LoadedModel, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """The greedy tokens of mlx-lm alone."""
    responses = stream_generate(model.model, model.tokenizer, list(prompt), max_tokens=max_tokens)
    return tuple(response.token for response in responses)[:max_tokens]


def prompt(agent: int, own: int = 6) -> list[int]:
    """A prompt that shares `SHARED` with the others, and nothing after it."""
    return [*SHARED, *((agent * 31 + 3 * at) % 240 + 10 for at in range(own))]


def request(agent: int = 0, **fields: Any) -> Request:
    """A request of one agent."""
    return Request(
        **{"tokens": prompt(agent), "max_tokens": 8, "agent": f"agent-{agent}", **fields}
    )
