"""Chat completions and completions as OpenAI's own client sees them: the real model where what it
says matters, and a random one where it does not."""

import json
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import anyio
import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from pydantic import BaseModel
from starlette.routing import BaseRoute

from mlx_swarm.broker.server.chat.routes import routes as chat_routes
from mlx_swarm.broker.server.completions.routes import routes as completion_routes
from mlx_swarm.broker.server.service import Service
from tests.server.idle import IDLE, idle_route
from tests.server.serving import SMOLLM2, serving

pytestmark = pytest.mark.timeout(120)

RANDOM = (
    "synthetic:llama?layers=2&hidden=64&heads=4&kv_heads=2&intermediate=128&context=8192&seed=3"
)
COLOUR: list[Any] = [{"role": "user", "content": "Name a colour."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}


class Colour(BaseModel):
    """What the model has to fill in."""

    name: Literal["red", "blue"]
    is_warm: bool


def _routes(service: Service) -> list[BaseRoute]:
    return [*chat_routes(service), *completion_routes(service), idle_route(service)]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(RANDOM, routes=_routes, prefill_chunk=16) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        yield client
        assert client.get(f"..{IDLE}", cast_to=str) == "idle"


@pytest.fixture(scope="module")
def smollm2() -> Iterator[openai.OpenAI]:
    with (
        serving(SMOLLM2, routes=_routes, dtype="float32") as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
    ):
        yield client


def test_an_answer_is_whole_and_its_stream_is_the_same(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": RANDOM,
        "messages": COLOUR,
        "max_tokens": 8,
        "temperature": 0.9,
        "seed": 11,
        "logprobs": True,
        "top_logprobs": 2,
        "n": 3,
    }
    whole = client.chat.completions.create(**asked)
    assert whole.id.startswith("chatcmpl-")
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert len({each.message.content for each in whole.choices}) == 3
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert all(len(each.top_logprobs) == 2 for each in choice.logprobs.content)

    options: Any = {"include_usage": True}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=options))
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(each.usage is None for each in chunks[:-1])
    for index, choice in enumerate(whole.choices):
        assert _text(chunks, index) == choice.message.content
        assert _reason(chunks, index) == choice.finish_reason
        first = next(each for each in chunks if each.choices[0].index == index)
        assert first.choices[0].delta.role == "assistant"
        parts = [each.choices[0] for each in chunks[:-1] if each.choices[0].index == index]
        found = [token for part in parts if part.logprobs for token in part.logprobs.content or []]
        assert choice.logprobs is not None
        assert [each.token for each in found] == [
            each.token for each in choice.logprobs.content or []
        ]


def test_the_real_model_says_what_its_tokens_are(smollm2: openai.OpenAI) -> None:
    asked: Any = {"model": SMOLLM2, "messages": COLOUR, "max_tokens": 4, "temperature": 0}
    [choice] = smollm2.chat.completions.create(**asked, logprobs=True).choices
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    written = b"".join(bytes(each.bytes or []) for each in choice.logprobs.content or [])
    text = choice.message.content or ""
    assert written.decode() == text
    word = text.split()[2]
    [stopped] = smollm2.chat.completions.create(**asked, stop=word).choices
    assert stopped.finish_reason == "stop"
    assert stopped.message.content == text[: text.index(word)]
    stream = smollm2.chat.completions.create(**asked, stream=True)
    assert _text(stream, 0) == text


def test_a_tool_that_has_to_be_called_is(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": RANDOM,
        "messages": [{"role": "user", "content": "How is the weather in Rome?"}],
        "tools": [TIME, WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 200,
    }
    [choice] = client.chat.completions.create(**asked).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")

    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls is not None
    assert final.message.tool_calls[0].function.arguments == call.function.arguments

    answered = [
        *asked["messages"],
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny."},
    ]
    asked |= {"messages": answered, "tool_choice": "auto", "max_tokens": 4}
    assert client.chat.completions.create(**asked).choices[0].message.role == "assistant"
    asked |= {"tool_choice": "none"}
    assert client.chat.completions.create(**asked).choices[0].message.tool_calls is None


def test_required_tools_and_functions_before_tools(client: openai.OpenAI) -> None:
    asked: Any = {"model": RANDOM, "messages": COLOUR, "temperature": 0, "max_tokens": 200}
    required = client.chat.completions.create(
        **asked, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False
    )
    assert required.choices[0].message.tool_calls is not None
    old = client.chat.completions.create(
        **asked, functions=[WEATHER["function"]], function_call={"name": "weather"}
    )
    assert old.choices[0].finish_reason == "function_call"
    assert old.choices[0].message.function_call is not None
    assert old.choices[0].message.function_call.name == "weather"


def test_an_answer_keeps_to_a_schema(client: openai.OpenAI) -> None:
    asked: Any = {"model": RANDOM, "messages": COLOUR, "temperature": 0, "max_tokens": 400}
    parsed = client.chat.completions.parse(**asked, response_format=Colour).choices[0].message
    assert isinstance(parsed.parsed, Colour)
    with client.chat.completions.stream(**asked, response_format=Colour) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed.parsed
    asked["max_tokens"] = 50
    some = client.chat.completions.create(**asked, response_format={"type": "json_object"})
    assert (some.choices[0].message.content or "").lstrip().startswith("{")


def test_completions_of_several_prompts(client: openai.OpenAI) -> None:
    prompts = ["The capital of France is", "One, two, three,"]
    asked: Any = {"model": RANDOM, "prompt": prompts, "n": 2, "seed": 3, "max_tokens": 4}
    whole = client.completions.create(**asked, logprobs=1)
    assert [each.index for each in whole.choices] == [0, 1, 2, 3]
    chunks = list(client.completions.create(**asked, logprobs=1, stream=True))
    for index, choice in enumerate(whole.choices):
        parts = [each.choices[0] for each in chunks if each.choices[0].index == index]
        assert "".join(part.text for part in parts) == choice.text
        offsets = [at for part in parts if part.logprobs for at in part.logprobs.text_offset or []]
        assert choice.logprobs is not None
        assert offsets == choice.logprobs.text_offset
        assert len(offsets) == len(choice.logprobs.tokens or [])
    assert len({each.text for each in whole.choices[:2]}) == 2


@pytest.mark.parametrize(("max_tokens", "reply"), [(0, ""), (2, " Paris.")])
def test_echo_gives_the_prompt_and_what_it_was_worth(
    smollm2: openai.OpenAI, max_tokens: int, reply: str
) -> None:
    prompt = "The capital of France is"
    asked: Any = {"model": SMOLLM2, "max_tokens": max_tokens, "echo": True, "temperature": 0}
    [choice] = smollm2.completions.create(**asked, prompt=prompt, logprobs=0).choices
    assert choice.text == prompt + reply
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    tokens, offsets = choice.logprobs.tokens or [], choice.logprobs.text_offset or []
    assert len(tokens) == 5 + max_tokens
    for token, offset in zip(tokens, offsets, strict=True):
        assert choice.text[offset:].startswith(token)
    for logprobs in (None, 0):
        stream = smollm2.completions.create(**asked, prompt=prompt, logprobs=logprobs, stream=True)
        assert "".join(each.choices[0].text for each in stream) == choice.text


def test_tokens_are_a_prompt_too(client: openai.OpenAI) -> None:
    asked: Any = {"model": RANDOM, "max_tokens": 2, "echo": True, "temperature": 0}
    one = client.completions.create(**asked, prompt=[65, 66, 67])
    several = client.completions.create(**asked, prompt=[[65, 66, 67], [68]])
    assert several.choices[0].text == one.choices[0].text
    assert several.usage is not None
    assert several.usage.prompt_tokens == 4


def test_errors_have_their_class_and_field(client: openai.OpenAI) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as wrong:
        create(model=RANDOM, messages=COLOUR, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        create(model="nobody", messages=COLOUR)
    assert unknown.value.code == "model_not_found"
    long: list[Any] = [{"role": "user", "content": "word " * 2000}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as overflow:
            create(model=RANDOM, messages=long, stream=stream)
        assert overflow.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        create(model=RANDOM, messages=COLOUR, logit_bias={"99999": 1})
    wrong_schema: Any = {"name": "x", "schema": {"type": "colour"}}
    wanted: Any = {"type": "json_schema", "json_schema": wrong_schema}
    with pytest.raises(openai.BadRequestError):
        create(model=RANDOM, messages=COLOUR, response_format=wanted, stream=True)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=RANDOM, prompt=[99999])


@pytest.mark.parametrize("content", ["word " * 1500, "Count to a million."])
def test_a_client_that_goes_away_leaves_nothing(client: openai.OpenAI, content: str) -> None:
    messages: list[Any] = [{"role": "user", "content": content}]
    asked: Any = {"model": RANDOM, "messages": messages, "n": 3, "max_tokens": 3000}
    asked |= {"extra_body": {"min_tokens": 3000}}
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).chat.completions.create(**asked)
    stream = client.chat.completions.create(**asked, stream=True)
    if content.startswith("Count"):
        assert next(stream)
        assert next(stream)
    stream.close()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_many_ask_at_once(url: str) -> None:
    texts: dict[int, str | None] = {}

    async def ask(seed: int) -> None:
        asked: Any = {"model": RANDOM, "messages": COLOUR, "max_tokens": 4, "seed": seed % 2}
        found = await asking.chat.completions.create(**asked)
        texts[seed] = found.choices[0].message.content

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as asking:
        async with anyio.create_task_group() as tasks:
            for seed in range(6):
                tasks.start_soon(ask, seed)
    assert len(set(texts.values())) == 2


def _text(chunks: Iterable[ChatCompletionChunk], index: int) -> str:
    found = [each.choices[0] for each in chunks if each.choices]
    return "".join(each.delta.content or "" for each in found if each.index == index)


def _reason(chunks: Iterable[ChatCompletionChunk], index: int) -> str | None:
    found = [each.choices[0] for each in chunks if each.choices]
    [reason] = [each.finish_reason for each in found if each.index == index and each.finish_reason]
    return reason
