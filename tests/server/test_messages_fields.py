"""Any JSON in any field of a request of the Messages API works or is a 400, and breaks nothing."""

import copy
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mlx_swarm.broker.server.messages.routes import routes
from tests.server.serving import serving
from tests.tiny_broker import TINY

MODEL = TINY.replace("context=256", "context=2048")
MARK = {"type": "ephemeral"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 4}}}
BODY: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 1,
    "system": [{"type": "text", "text": "Hi.", "cache_control": MARK}],
    "messages": [
        {"role": "user", "content": "Hello."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "Well."},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "21", "is_error": False},
                {"type": "text", "text": "So?", "cache_control": MARK},
            ],
        },
    ],
    "tools": [{"name": "f", "description": "F.", "input_schema": SCHEMA, "cache_control": MARK}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "stop_sequences": ["stop"],
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "metadata": {"user_id": "u"},
    "output_config": None,
    "output_format": None,
    "cache_control": None,
    "service_tier": "auto",
    "stream": False,
}

Path = tuple[str | int, ...]


def _paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """The place of everything in a value."""
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in parts:
        yield (*path, key)
        if isinstance(part, dict | list):
            yield from _paths(part, (*path, key))


NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
SCHEMAS = st.sampled_from(
    [
        {"format": {"type": "json_schema", "schema": SCHEMA}},
        {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}},
        {"type": "json_schema", "schema": {"$ref": "#/nowhere"}},
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8) | st.just("x" * 5000) | SCHEMAS,
    lambda parts: (
        st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=8), parts, max_size=3)
    ),
    max_leaves=6,
)
CHANGES = st.lists(st.tuples(st.sampled_from(list(_paths(BODY))), JSON), min_size=1, max_size=2)


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """One server for all of them."""
    with serving(MODEL, routes=routes) as url, httpx.Client(base_url=url, timeout=60) as opened:
        yield opened


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(changes=CHANGES)
@example(changes=[])
@example(changes=[(("stream",), True)])
@example(changes=[(("top_k",), 2**63)])
@example(changes=[(("tools", 0, "input_schema"), {"properties": 7})])
@example(changes=[(("messages", 1, "content", 2, "input"), {"a": 2**200, "b": {"c": [None]}})])
def test_any_json_in_any_field_works_or_is_a_400(
    client: httpx.Client, changes: list[tuple[Path, Any]]
) -> None:
    body = copy.deepcopy(BODY)
    for path, value in changes:
        _set(body, path, value)
    answer = client.post("/v1/messages", json=body)
    assert changes or answer.status_code == 200
    if answer.status_code == 200:
        assert "event: error" not in answer.text
        return
    assert answer.status_code in ((400, 404) if body.get("model") != MODEL else (400,)), answer.text
    assert answer.json()["error"]["type"] in ("invalid_request_error", "not_found_error")
    assert answer.json()["error"]["message"]


def _set(body: Any, path: Path, value: Any) -> None:
    *way, last = path
    for key in way:
        # A change before this one may have taken the place away.
        try:
            body = body[key]
        except (KeyError, IndexError, TypeError):
            return
    if isinstance(body, dict):
        body[last] = value
    elif isinstance(body, list) and isinstance(last, int) and last < len(body):
        body[last] = value
