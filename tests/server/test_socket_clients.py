"""The Responses API over WebSocket, by the packages that programs use it with."""

import os
import sys
from typing import Any

import anyio
import pytest
from anyio import to_thread

from tests.server.sockets import running

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.anyio

TOKENS = "synthetic:llama?layers=1&hidden=32&heads=2&context=8192&tokenizer=smollm2-135m"
ENDS = ("response.completed", "response.incomplete")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_the_asynchronous_client_of_openai() -> None:
    async with running(TOKENS) as server:
        client = openai.AsyncOpenAI(api_key="none", base_url=server.url, max_retries=0)
        async with client, client.responses.connect() as connection:

            async def turn(input: str, **fields: Any) -> Any:
                fields = {"max_output_tokens": 8, **fields}
                await connection.response.create(input=input, model=TOKENS, **fields)
                async for event in connection:
                    assert getattr(event, "stream_id", None) == fields.get("stream_id")
                    assert event.type != "error", event
                    if event.type in ENDS:
                        return event.response
                raise AssertionError("the connection ended")

            warm = await turn("one", generate=False)
            assert warm.status == "completed"
            first = await turn("one")
            assert first.usage.input_tokens_details.cached_tokens > 0
            second = await turn("two", previous_response_id=first.id)
            fork = await turn("three", previous_response_id=first.id, stream_id="fork")
            assert second.previous_response_id == fork.previous_response_id == first.id

            for number in range(8):
                await connection.response.create(
                    input="side by side", model=TOKENS, max_output_tokens=8, stream_id=str(number)
                )
            ended: set[str] = set()
            while len(ended) < 8:
                event = await connection.recv()
                if event.type in ENDS:
                    ended.add(event.stream_id)

            await connection.response.create(input="long", model=TOKENS)
            await connection.recv()
            await connection.send({"type": "response.cancel"})
            async for event in connection:
                if event.type in ENDS:
                    assert event.response.status == "cancelled"
                    break

            await connection.response.steer(input="no", previous_response_id=first.id)
            event = await connection.recv()
            assert (event.type, event.status, event.error.param) == ("error", 400, "type")


async def test_the_synchronous_client_of_openai() -> None:
    def use(url: str) -> None:
        with (
            openai.OpenAI(api_key="none", base_url=url, max_retries=0) as client,
            client.responses.connect() as connection,
        ):
            previous = None
            for words in ("one", "two"):
                connection.response.create(
                    input=words,
                    model=TOKENS,
                    max_output_tokens=8,
                    **({"previous_response_id": previous} if previous else {}),
                )
                for event in connection:
                    assert event.type != "error", event
                    if event.type in ENDS:
                        assert event.response.previous_response_id == previous
                        previous = event.response.id
                        break

    async with running(TOKENS) as server:
        await to_thread.run_sync(use, server.url)


AGENTS = """
import asyncio, sys
from agents import Agent, ModelSettings, function_tool, responses_websocket_session
from agents import set_tracing_disabled

@function_tool
def weather() -> str:
    "The weather."
    return "sunny"

async def main(url, model):
    set_tracing_disabled(True)
    forced = ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=200)
    expert = Agent(name="expert", tools=[weather], model=model, model_settings=forced,
                   tool_use_behavior="stop_on_first_tool")
    triage = Agent(name="triage", handoffs=[expert], model=model, model_settings=forced)
    async with responses_websocket_session(
        api_key="none", base_url=url, websocket_base_url=url.replace("http", "ws")
    ) as session:
        result = await session.run(triage, "Weather?")
        print(result.last_agent.name, result.final_output)
        print(*(item.type for item in result.new_items))
        streamed = session.run_streamed(expert, "Again?")
        async for event in streamed.stream_events():
            pass
        print(streamed.final_output)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_openai_agents_with_a_handoff_and_a_tool() -> None:
    pytest.importorskip("openai")
    async with running(TOKENS) as server:
        # Isolated: the package is named as a folder here is.
        command = [sys.executable, "-I", "-W", "ignore", "-c", AGENTS, server.url, TOKENS]
        done = await anyio.run_process(command, check=False, env={**os.environ})
        output = done.stdout.decode().splitlines()
        assert output == [
            "expert sunny",
            "handoff_call_item handoff_output_item tool_call_item tool_call_output_item",
            "sunny",
        ], done.stderr.decode()
