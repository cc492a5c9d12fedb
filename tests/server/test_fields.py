"""What only the engine finds wrong: each API names its own field for it."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.server.raw import error_of, exchange, head
from tests.server.serving import serving

NO_SCHEMA = {"type": "nonsense"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
TEXT: dict[str, Any] = {"prompt": "Hi", "max_tokens": 1}
INPUT: dict[str, Any] = {"input": "Hi", "max_output_tokens": 1}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(
        "synthetic:llama?layers=1&hidden=64&heads=2&context=2048", prefill_chunk=16
    ) as url:
        yield url


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {**CHAT, "logit_bias": {"99999": 1}}, "logit_bias"),
        (
            "chat/completions",
            {
                **CHAT,
                "response_format": {"type": "json_schema", "json_schema": {"schema": NO_SCHEMA}},
            },
            "response_format",
        ),
        (
            "chat/completions",
            {**CHAT, "messages": [{"role": "user", "content": "a" * 3000}]},
            "messages",
        ),
        ("completions", {**TEXT, "logit_bias": {"99999": 1}}, "logit_bias"),
        ("completions", {**TEXT, "prompt": [-1]}, "prompt"),
        ("completions", {**TEXT, "prompt": [99999]}, "prompt"),
        ("completions", {**TEXT, "prompt": [2**40]}, "prompt"),
        ("completions", {**TEXT, "prompt": [20] * 2048}, "prompt"),
        ("completions", {**TEXT, "prompt": "a" * 10**6}, "prompt"),
        ("responses", {**INPUT, "logit_bias": {"99999": 1}}, "logit_bias"),
        ("responses", {**INPUT, "logit_bias": {"1": 1000}}, "logit_bias"),
        ("responses", {**INPUT, "stop": ["a", ""]}, "stop"),
        ("responses", {**INPUT, "input": "a" * 10**6}, "input"),
        (
            "responses",
            {**INPUT, "text": {"format": {"type": "json_schema", "schema": NO_SCHEMA}}},
            "text.format.schema",
        ),
    ],
)
def test_what_the_engine_refuses_names_its_field(
    url: str, path: str, body: dict[str, Any], param: str
) -> None:
    data = msgspec.json.encode(body)
    request = head("POST", f"/v1/{path}", f"Content-Length: {len(data)}") + data
    status, _, answer = exchange(url, request)
    assert (status, error_of(answer)["param"]) == (400, param)


@pytest.mark.parametrize("length", [3000, 10**6])
def test_a_message_that_is_too_long_is_refused_in_the_words_that_clients_know(
    url: str, length: int
) -> None:
    message = {"role": "user", "content": "a" * length}
    data = msgspec.json.encode({"model": "", "messages": [message], "max_tokens": 1})
    request = head("POST", "/v1/messages", f"Content-Length: {len(data)}") + data
    status, _, answer = exchange(url, request)
    error = msgspec.json.decode(answer)["error"]
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith("prompt is too long: ")
