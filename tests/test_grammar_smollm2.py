"""Grammars on the real model: real tokens span the pieces of a grammar, and outputs keep to it."""

import json
import re

import anyio
import pytest

from mlx_swarm.broker import Broker, Completed, Grammar, Message, Request, Sampling

# About ten seconds on an idle machine with two cores.
pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CALL = """
start: <|im_start|> "weather" "(" CITY ")"
CITY: /[A-Z][a-z]{2,9}/
"""
WARM = Sampling(temperature=0.8, seed=3)
ASKED = (
    (Grammar(choice=["Paris", "London", "Rome"]), Sampling()),
    (Grammar(regex=r"[0-9]{4}-[0-9]{2}-[0-9]{2}"), WARM),
    (Grammar(json_schema=PERSON), Sampling(repetition_penalty=1.1)),
    (Grammar(json_schema=PERSON), WARM),
    (Grammar(lark=CALL), Sampling()),
    (None, Sampling()),
    (None, WARM),
)


def _request(number: int) -> Request:
    grammar, sampling = ASKED[number]
    question = Message("user", "What is the capital of France?")
    return Request(messages=[question], max_tokens=32, grammar=grammar, sampling=sampling)


@pytest.fixture
def anyio_backend() -> str:
    """Once is enough: the model is the point here."""
    return "asyncio"


async def test_outputs_keep_to_their_grammars_and_others_do_not_notice() -> None:
    together: dict[int, Completed] = {}

    async def ask(number: int) -> None:
        together[number] = await broker.complete(_request(number))

    async with Broker("smollm2-135m", dtype="float32") as broker:
        async with anyio.create_task_group() as group:
            for number in range(len(ASKED)):
                group.start_soon(ask, number)
        alone = {number: await broker.complete(_request(number)) for number in (1, 5, 6)}
    for number, one in alone.items():
        assert together[number].tokens == one.tokens
        assert together[number].text == one.text
    assert together[0].text in ("Paris", "London", "Rome")
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", together[1].text)
    for number in (2, 3):
        person = json.loads(together[number].text)
        assert list(person) == ["name", "age"]
        assert isinstance(person["age"], int)
    assert re.fullmatch(r"<\|im_start\|>weather\([A-Z][a-z]{2,9}\)", together[4].text)
    assert all(together[number].finish_reason == "stop" for number in range(5))
