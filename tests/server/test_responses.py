"""The Responses API as OpenAI's own client meets it, over a tiny random model."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import pytest
from openai import BadRequestError, NotFoundError, OpenAI, Stream
from openai.types.responses import (
    Response,
    ResponseFunctionToolCall,
    ResponseStreamEvent,
)
from pydantic import BaseModel
from starlette.routing import BaseRoute

from mlx_swarm.broker.server.responses.routes import routes
from mlx_swarm.broker.server.service import Service
from mlx_swarm.broker.server.settings import ApiKey, ServerSettings
from tests.server.serving import serving

MODEL = "synthetic:llama?layers=2&hidden=64&heads=4&kv_heads=2&intermediate=128&context=2048&seed=3"
GIVEN: dict[str, Any] = {
    "model": MODEL,
    "max_output_tokens": 6,
    "temperature": 0,
    "extra_body": {"min_tokens": 6},
}
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "How it is.",
    "parameters": {
        "type": "object",
        "properties": {"sky": {"enum": ["clear", "grey"]}},
        "required": ["sky"],
        "additionalProperties": False,
    },
    "strict": True,
}

KEY = {"authorization": "Bearer first"}


class Verdict(BaseModel):
    word: Literal["yes", "no"]
    sure: bool


SETTINGS = ServerSettings(
    ring_events=64, api_keys=(ApiKey("first", "one"), ApiKey("second", "two"))
)


def endpoints(service: Service) -> list[BaseRoute]:
    return routes(service)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(MODEL, settings=SETTINGS, routes=endpoints) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="first", max_retries=0) as client:
        yield client


def ask(client: OpenAI, text: Any = "How are you?", **fields: Any) -> Response:
    given = {**GIVEN, **fields}
    response = client.responses.create(input=text, **given)
    assert isinstance(response, Response)
    return response


def events(client: OpenAI, text: Any = "How are you?", **fields: Any) -> list[ResponseStreamEvent]:
    given = {**GIVEN, **fields}
    stream = client.responses.create(input=text, stream=True, **given)
    assert isinstance(stream, Stream)
    return list(stream)


def cached(response: Response) -> int:
    assert response.usage is not None
    return response.usage.input_tokens_details.cached_tokens


def total(response: Response) -> int:
    assert response.usage is not None
    return response.usage.total_tokens


def test_a_response_has_text_usage_and_what_was_asked(client: OpenAI) -> None:
    response = ask(
        client, instructions="Be brief.", metadata={"a": "b"}, user="me", tools=[WEATHER]
    )
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text
    assert response.usage is not None
    assert response.usage.output_tokens == 6
    assert total(response) == response.usage.input_tokens + 6
    assert (response.model, response.instructions, response.user) == (MODEL, "Be brief.", "me")
    assert (response.metadata, response.temperature, response.tool_choice) == (
        {"a": "b"},
        0,
        "auto",
    )
    assert response.tools[0].to_dict() == WEATHER


def test_a_stream_adds_up_to_the_response(client: OpenAI) -> None:
    got = events(client)
    assert [event.sequence_number for event in got] == list(range(len(got)))
    deltas = [event for event in got if event.type == "response.output_text.delta"]
    others = [event.type for event in got if event.type != "response.output_text.delta"]
    assert others == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    last = got[-1]
    assert last.type == "response.incomplete"
    assert "".join(event.delta for event in deltas) == last.response.output_text
    assert last.response.output_text == ask(client).output_text
    assert client.responses.retrieve(last.response.id) == last.response


def test_logprobs_come_with_the_text(client: OpenAI) -> None:
    got = events(client, include=["message.output_text.logprobs"], top_logprobs=2)
    streamed = [
        each.logprob
        for event in got
        if event.type == "response.output_text.delta"
        for each in event.logprobs
    ]
    last = got[-1]
    assert last.type == "response.incomplete"
    message = last.response.output[0]
    assert message.type == "message"
    part = message.content[0]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [each.logprob for each in part.logprobs] == streamed
    assert len(streamed) == 6
    assert all(len(each.top_logprobs) == 2 for each in part.logprobs)


def test_a_tool_is_called_and_its_result_goes_on(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "tools": [WEATHER],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    with client.responses.stream(
        model=MODEL, input="Sky?", max_output_tokens=500, temperature=0, **asked
    ) as stream:
        done = [event for event in stream if event.type == "response.function_call_arguments.done"]
        first = stream.get_final_response()
    call = first.output[-1]
    assert isinstance(call, ResponseFunctionToolCall)
    assert first.status == "completed"
    assert json.loads(call.arguments)["sky"] in ("clear", "grey")
    assert [event.arguments for event in done] == [call.arguments]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "blue"}
    second = ask(client, [result], previous_response_id=first.id, tools=[WEATHER])
    assert second.previous_response_id == first.id
    stateless = [{"role": "user", "content": "Sky?"}, call.to_dict(), result]
    assert ask(client, stateless, tools=[WEATHER]).output_text == second.output_text


def test_structured_output_is_parsed(client: OpenAI) -> None:
    response = client.responses.parse(
        model=MODEL, input="Is it?", text_format=Verdict, max_output_tokens=500, temperature=0
    )
    assert isinstance(response.output_parsed, Verdict)
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"


def test_a_conversation_goes_on_and_forks_from_what_is_cached(client: OpenAI) -> None:
    first = ask(client, "A long question, to be answered.", instructions="Be brief.")
    forks = [
        ask(client, text, previous_response_id=first.id, instructions="Be brief.")
        for text in ("One way.", "Another way.")
    ]
    third = ask(client, "On.", previous_response_id=forks[0].id, instructions="Be brief.")
    for before, after in ((first, forks[0]), (first, forks[1]), (forks[0], third)):
        assert cached(after) >= total(before) - 1
    items = [item.to_dict() for item in client.responses.input_items.list(third.id, order="asc")]
    said = [item["content"] for item in items if item["role"] == "user"]
    texts = ["A long question, to be answered.", "One way.", "On."]
    assert said == [[{"type": "input_text", "text": text}] for text in texts]
    assert items[1]["content"][0]["text"] == first.output_text  # type: ignore[index]


def test_instructions_are_not_carried_over(client: OpenAI) -> None:
    first = ask(client, "Hello.", instructions="Speak like a pirate, all the time.")
    swapped = ask(client, "On.", previous_response_id=first.id, instructions="x")
    without = ask(client, "On.", previous_response_id=first.id)
    history: list[Any] = [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "On."},
    ]
    assert ask(client, history, instructions="x").output_text == swapped.output_text
    assert ask(client, history).output_text == without.output_text
    assert without.instructions is None


def test_an_item_can_be_referred_to(client: OpenAI) -> None:
    first = ask(client)
    reference: Any = {"type": "item_reference", "id": first.output[0].id}
    again: Any = {"role": "user", "content": "Again."}
    assert (
        ask(client, [reference, again]).output_text
        == ask(client, [{"role": "assistant", "content": first.output_text}, again]).output_text
    )


def test_a_prompt_can_be_computed_without_an_answer(client: OpenAI) -> None:
    got = events(client, "A question that is known early.", extra_body={"generate": False})
    assert [event.type for event in got] == [
        "response.created",
        "response.in_progress",
        "response.completed",
    ]
    warm = got[-1]
    assert warm.type == "response.completed"
    assert (warm.response.output, warm.response.status) == ([], "completed")
    assert warm.response.usage is not None
    assert warm.response.usage.output_tokens == 0
    after = ask(client, [], previous_response_id=warm.response.id)
    assert cached(after) == warm.response.usage.input_tokens - 1


def test_a_response_is_deleted_for_good(client: OpenAI) -> None:
    first = ask(client)
    second = ask(client, "On.", previous_response_id=first.id)
    client.responses.delete(first.id)
    for refused in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(NotFoundError):
            refused(first.id)
    with pytest.raises(BadRequestError) as unknown:
        ask(client, previous_response_id=first.id)
    assert (unknown.value.code, unknown.value.param) == (
        "previous_response_not_found",
        "previous_response_id",
    )
    assert ask(client, "On.", previous_response_id=second.id).status == "incomplete"


def test_what_is_not_stored_is_not_there(client: OpenAI) -> None:
    response = ask(client, store=False)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(BadRequestError):
        ask(client, previous_response_id=response.id)


def test_events_can_be_had_again(client: OpenAI) -> None:
    got = events(client)
    first = got[0]
    assert first.type == "response.created"
    id = first.response.id
    assert list(client.responses.retrieve(id, stream=True)) == got
    assert list(client.responses.retrieve(id, stream=True, starting_after=3)) == got[4:]


def test_a_running_response_is_seen_and_cancelled(client: OpenAI, url: str) -> None:
    body = {"model": MODEL, "input": "Go.", "stream": True, "min_tokens": 1900, "temperature": 0}
    with httpx.stream("POST", f"{url}/v1/responses", json=body, headers=KEY, timeout=60) as stream:
        lines = stream.iter_lines()
        created = json.loads(next(line for line in lines if line.startswith("data: "))[6:])
        id = created["response"]["id"]
        assert client.responses.retrieve(id).status == "in_progress"
        cancelled = client.responses.cancel(id)
        last = json.loads([line for line in lines if line.startswith("data: ")][-1][6:])
    assert cancelled.status == "cancelled"
    assert last["type"] == "response.incomplete"
    assert last["response"]["status"] == "cancelled"
    assert client.responses.retrieve(id) == cancelled
    assert client.responses.cancel(id) == cancelled


def test_a_client_that_leaves_cancels(client: OpenAI, url: str) -> None:
    body = {"model": MODEL, "input": "Go.", "stream": True, "min_tokens": 1900, "temperature": 0}
    with httpx.stream("POST", f"{url}/v1/responses", json=body, headers=KEY, timeout=60) as stream:
        line = next(line for line in stream.iter_lines() if line.startswith("data: "))
    id = json.loads(line[6:])["response"]["id"]
    while (response := client.responses.retrieve(id)).status == "in_progress":
        pass
    assert response.status == "cancelled"


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"input": "x" * 3000}, 400, "context_length_exceeded", "input"),
        ({"input": "x", "temperature": 200}, 400, None, "temperature"),
        ({"input": "x", "previous_response_id": "resp_0"}, 400, "previous_response_not_found", ""),
        ({"input": "x", "model": "unknown"}, 404, "model_not_found", "model"),
        ({"input": [{"type": "computer_call"}]}, 400, None, "input[0].type"),
        ({"input": "x", "background": True}, 400, None, "background"),
        ({"input": "x", "stream": True, "top_logprobs": 50}, 400, None, "top_logprobs"),
    ],
)
def test_errors_are_openais(
    url: str, fields: dict[str, Any], status: int, code: str | None, param: str
) -> None:
    answer = httpx.post(f"{url}/v1/responses", json={"model": MODEL, **fields}, headers=KEY)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"], error["param"]) == (
        status,
        "invalid_request_error",
        code,
        param or "previous_response_id",
    )


def test_tenants_do_not_see_each_others(client: OpenAI) -> None:
    theirs = client.with_options(api_key="second")
    response = ask(client, "A secret of one tenant.")
    assert client.responses.retrieve(response.id) == response
    for refused in (
        theirs.responses.retrieve,
        theirs.responses.delete,
        theirs.responses.cancel,
        theirs.responses.input_items.list,
    ):
        with pytest.raises(NotFoundError):
            refused(response.id)
    with pytest.raises(BadRequestError):
        ask(theirs, previous_response_id=response.id)
    reference: Any = {"type": "item_reference", "id": response.output[0].id}
    with pytest.raises(BadRequestError):
        ask(theirs, [reference])
    assert cached(ask(theirs, "A secret of one tenant.")) == 0


def test_input_items_come_in_pages(client: OpenAI) -> None:
    texts = [f"number {at}" for at in range(5)]
    response = ask(client, [{"role": "user", "content": text} for text in texts])
    page = client.responses.input_items.list(response.id, limit=2)
    assert page.has_more
    assert [item.to_dict()["content"] for item in page] == [
        [{"type": "input_text", "text": text}] for text in texts[::-1]
    ]


def test_tokens_are_counted_beforehand(client: OpenAI) -> None:
    response = ask(client, "How many?", instructions="Count.")
    assert response.usage is not None
    counted = client.responses.input_tokens.count(
        model=MODEL, input="How many?", instructions="Count."
    )
    assert counted.input_tokens == response.usage.input_tokens
