"""Who a request says it is from."""

from collections.abc import Mapping
from typing import Any

import pytest
from starlette.requests import Request

from mlx_swarm.broker.server.errors import ApiError
from mlx_swarm.broker.server.turns.callers import LONGEST_NAME, caller
from mlx_swarm.broker.server.turns.turn import Caller

SESSION = "0a1b2c3d-0000-4000-8000-123456789abc"


def called(headers: Mapping[str, str] | None = None, tenant: str = "", **body: Any) -> Caller:
    raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    return caller(Request({"type": "http", "headers": raw, "state": {"tenant": tenant}}), **body)


@pytest.mark.parametrize(
    ("headers", "body", "agent"),
    [
        ({}, {}, ""),
        ({"x-session-id": "s"}, {"cache_key": "k", "user": "u"}, "k"),
        ({"x-session-id": "s"}, {"metadata": {"agent": "a", "user_id": "u"}}, "a"),
        ({"x-session-id": "s"}, {"user": "u"}, "s"),
        ({"session_id": "s"}, {}, "s"),
        ({"x-session-affinity": "s"}, {"user": "u"}, "s"),
        ({}, {"user": "u"}, "u"),
        ({}, {"cache_key": "  ", "user": "u"}, "u"),
        ({}, {"metadata": {"user_id": f"user_ab_account_cd_session_{SESSION}"}}, SESSION),
        ({}, {"metadata": {"user_id": f'{{"device_id":"d","session_id":"{SESSION}"}}'}}, SESSION),
        ({}, {"metadata": {"user_id": "{broken"}}, "{broken"),
        ({}, {"metadata": {"agent": 5, "session_id": None}}, ""),
        ({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}, {}, "s/a"),
        ({"x-claude-code-agent-id": "a"}, {}, "a"),
    ],
)
def test_the_agent_is_the_first_name_given(
    headers: Mapping[str, str], body: Mapping[str, Any], agent: str
) -> None:
    assert called(headers, **body).agent == agent


def test_tenant_and_swarm() -> None:
    assert called({}, "acme").tenant == "acme"
    assert called({"x-swarm": "w"}, metadata={"swarm": "v"}).swarm == "w"
    assert called(metadata={"swarm": "v"}).swarm == "v"


def test_long_names_stay_apart_and_short() -> None:
    names = [called(cache_key="n" * 5000 + end).agent for end in ("", "a", "b")]
    assert len(set(names)) == 3
    assert {len(name) for name in names} == {LONGEST_NAME}


@pytest.mark.parametrize(
    ("headers", "metadata", "priority"),
    [
        ({}, {}, 0),
        ({"x-priority": " -3 "}, {"priority": 5}, -3),
        ({}, {"priority": 5}, 5),
        ({}, {"priority": "10"}, 10),
    ],
)
def test_priorities(headers: Mapping[str, str], metadata: Mapping[str, Any], priority: int) -> None:
    assert called(headers, metadata=metadata).priority == priority


@pytest.mark.parametrize("priority", [11, -11, "high", "", 1.5, True, None, "9" * 50, [1]])
def test_what_is_no_priority_is_refused(priority: Any) -> None:
    with pytest.raises(ApiError, match="-10 to 10") as refused:
        called(metadata={"priority": priority})
    assert refused.value.status == 400
    assert refused.value.param == "metadata.priority"
