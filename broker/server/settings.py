"""What a server is given: one frozen struct of all that can be set. No MLX."""

from msgspec import Struct


class ApiKey(Struct, frozen=True):
    """A secret, and the tenant whose requests come with it."""

    secret: str
    tenant: str = ""

    def __repr__(self) -> str:
        return f"ApiKey('…', {self.tenant!r})"


class ServerSettings(Struct, frozen=True, kw_only=True):
    """Sizes are in bytes, times in seconds.

    `default_tokens` bounds a reply whose request says nothing (None: what the context has left).
    `temperature` is that of a request which says nothing. A stream on which nothing happens says so
    every `ping_seconds`. A connection whose client does not read may have `outbox_bytes` waiting;
    deltas in it are merged, and where it does not drain within `stall_seconds` the connection is
    closed. A response can be resumed by its last `ring_events` events; `store_bytes` bounds what
    is kept of ended ones. With a signal to end, running turns have `drain_seconds`.
    """

    host: str = "127.0.0.1"
    port: int = 8321
    api_keys: tuple[ApiKey, ...] = ()
    no_auth: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    default_tokens: int | None = None
    temperature: float = 1.0
    max_body: int = 32 << 20
    max_lanes: int = 1024
    max_connections: int = 1024
    header_seconds: float = 10.0
    body_seconds: float = 60.0
    ping_seconds: float = 10.0
    outbox_bytes: int = 4 << 20
    stall_seconds: float = 30.0
    ring_events: int = 4096
    store_bytes: int = 256 << 20
    drain_seconds: float = 30.0
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
