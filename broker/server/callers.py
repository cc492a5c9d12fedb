"""Who calls: the tenant of the key, and the agent that the request names."""

from collections.abc import Mapping

from starlette.requests import HTTPConnection

from .turn import Caller


def caller(
    connection: HTTPConnection,
    *,
    cache_key: str | None = None,
    user: str | None = None,
    metadata: Mapping[str, object] | None = None,
) -> Caller:
    """For whom a request of this connection is computed.

    `cache_key` is the body's `prompt_cache_key`, `user` its `user`; the agent is whatever of these
    names one, else it is found by lineage once the conversation is known.
    """
    tenant = getattr(connection.state, "tenant", "")
    return Caller(tenant=tenant, agent=cache_key or user or "")
