"""Who calls: the tenant of the key, and the agent, swarm and priority that the request names."""

import hashlib
import re
from collections.abc import Iterator, Mapping

import msgspec
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from ...request import MAX_PRIORITY
from ..errors import invalid
from .turn import Caller

LONGEST_NAME = 128

METADATA = ("agent", "agent_id", "session_id", "conversation_id", "thread_id", "user_id")
SESSIONS = (
    "x-agent-id",
    "x-session-id",
    "session-id",
    "session_id",
    "x-session-affinity",
    "x-claude-code-session-id",
    "x-opencode-session",
    "x-conversation-id",
    "conversation-id",
    "conversation_id",
    "thread-id",
    "x-litellm-session-id",
    "helicone-session-id",
)
SUBAGENT = "x-claude-code-agent-id"
SWARM = "x-swarm"
PRIORITY = "x-priority"

_SESSION = re.compile(r"_session_(?P<id>[0-9A-Za-z-]+)$")


def caller(
    connection: HTTPConnection,
    *,
    cache_key: str | None = None,
    user: str | None = None,
    metadata: Mapping[str, object] | None = None,
) -> Caller:
    """For whom a request of this connection is computed.

    `cache_key` is the body's `prompt_cache_key`, `user` its `user` or `safety_identifier`. The
    agent is the first name among `cache_key`, the metadata, the headers that agent programs send,
    and `user`; without any it is found by lineage once the conversation is known. Raises `ApiError`
    for a priority that is none.
    """
    headers, known = connection.headers, metadata or {}
    agent = next(_names(headers, known, cache_key, user), "")
    if subagent := headers.get(SUBAGENT, "").strip():
        agent = f"{agent}/{subagent}" if agent else subagent
    return Caller(
        tenant=getattr(connection.state, "tenant", ""),
        swarm=_bounded(headers.get(SWARM, "").strip() or _text(known, "swarm")),
        agent=_bounded(agent),
        priority=_priority(headers, known),
    )


def _names(
    headers: Headers, metadata: Mapping[str, object], cache_key: str | None, user: str | None
) -> Iterator[str]:
    """Every name that an agent is given, the one that counts first."""
    given = [cache_key or ""]
    given += [_session(_text(metadata, name)) for name in METADATA]
    given += [headers.get(name, "") for name in SESSIONS]
    given += [user or ""]
    return (name.strip() for name in given if name.strip())


def _session(name: str) -> str:
    """The session alone, of a name that goes on with other things, which may change."""
    if name.startswith("{"):
        try:
            return msgspec.json.decode(name, type=dict[str, str])["session_id"]
        except (msgspec.DecodeError, KeyError):
            return name
    found = _SESSION.search(name)
    return found["id"] if found else name


def _text(metadata: Mapping[str, object], name: str) -> str:
    value = metadata.get(name)
    return value.strip() if isinstance(value, str) else ""


def _priority(headers: Headers, metadata: Mapping[str, object]) -> int:
    value = headers.get(PRIORITY, metadata.get("priority", 0))
    where = PRIORITY if PRIORITY in headers else "metadata.priority"
    number: int | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,4}\s*", value):
        number = int(value)
    if number is None or abs(number) > MAX_PRIORITY:
        raise invalid(
            f"{where} is {str(value)[:LONGEST_NAME]!r}; it must be a whole number from "
            f"{-MAX_PRIORITY} to {MAX_PRIORITY}",
            where,
        )
    return number


def _bounded(name: str) -> str:
    """A name of bearable length; a longer one keeps its beginning, and stays one of its own."""
    if len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:16]
    return f"{name[: LONGEST_NAME - 17]}-{digest}"
