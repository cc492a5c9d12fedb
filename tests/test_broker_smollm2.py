"""The real model: greedy tokens through the broker are those of mlx-lm alone."""

import anyio
import pytest
from msgspec.structs import replace

from mlx_swarm.broker import Broker, Completed, Message, Request
from mlx_swarm.broker.models.boundaries import common_prefix
from tests.tiny_broker import check_idle, inside, reference

# About ten seconds on an idle machine with two cores.
pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

INSTRUCTIONS = (
    "You are a careful assistant of a small library. Answer each question in one short sentence. "
    "Use plain words. If you do not know the answer, say that you do not know."
)
QUESTIONS = (
    "What is the capital of France?",
    "Name a colour.",
    "How many days has a week?",
    "What is the opposite of hot?",
    "Who wrote Hamlet?",
    "What do bees make?",
    "What is 2 + 3?",
    "Where does the sun rise?",
)
MAX_TOKENS = 6


def _request(question: str) -> Request:
    messages = [Message("system", INSTRUCTIONS), Message("user", question)]
    return Request(messages=messages, max_tokens=MAX_TOKENS)


@pytest.fixture
def anyio_backend() -> str:
    """Once is enough: the model is the point here."""
    return "asyncio"


async def test_eight_prompts_with_one_prefix_answer_like_mlx_lm_batched_and_alone() -> None:
    asked = [_request(question) for question in QUESTIONS]
    batched: dict[int, Completed] = {}

    async def ask(index: int, each: Request) -> None:
        batched[index] = await broker.complete(each)

    async with Broker("smollm2-135m", dtype="float32") as broker:
        async with anyio.create_task_group() as group:
            for index, each in enumerate(asked):
                group.start_soon(ask, index, each)
        alone = [await broker.complete(replace(each, max_tokens=3)) for each in asked[:3]]
        prompts = [batched[index].prompt for index in range(8)]
        expected = await inside(
            broker,
            lambda engine: [reference(engine.model, each, MAX_TOKENS) for each in prompts],
        )
        await check_idle(broker)
    assert [batched[index].tokens for index in range(8)] == expected
    assert [result.tokens for result in alone] == [each[:3] for each in expected[:3]]
    shared = len(common_prefix(prompts))
    own = sum(len(each) - shared for each in prompts)
    prefilled = sum(result.usage.prefilled_tokens for result in batched.values())
    assert shared > 40
    assert prefilled <= shared + own + 8
    assert "Paris" in batched[0].text
