"""What a server is given: one frozen struct of all that can be set. No MLX."""

from collections.abc import Iterator
from typing import Annotated, Any

from msgspec import Meta, Struct

Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
Bytes = Annotated[int, Meta(ge=1)]

SIZES = frozenset(("max_body", "outbox_bytes", "store_bytes"))
"""Fields in bytes which may be written as sizes, "32MiB" say."""


class ApiKey(Struct, frozen=True):
    """A secret, and the tenant whose requests come with it."""

    secret: str
    tenant: str = ""

    def __repr__(self) -> str:
        return f"ApiKey('…', {self.tenant!r})"

    def __rich_repr__(self) -> Iterator[Any]:  # type: ignore[override]
        yield "…"
        yield self.tenant


class Adapter(Struct, frozen=True, forbid_unknown_fields=True):
    """A LoRA adapter in a folder, over the weights of a model (default: the first one)."""

    path: str
    base: str = ""


class ServerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes are in bytes, times in seconds; `config` says where each may be set.

    `default_tokens` bounds a reply whose request says nothing (None: what the context has left).
    `temperature` is that of a request which says nothing. A stream on which nothing happens says so
    every `ping_seconds`. A connection whose client does not read may have `outbox_bytes` waiting;
    deltas in it are merged, and where it does not drain within `stall_seconds` the connection is
    closed. A response can be resumed by its last `ring_events` events; `store_bytes` bounds what
    is kept of ended ones. With a signal to end, running turns have `drain_seconds`.

    From `model` on, `BROKER` names what a `Broker` takes, and what it is to load besides.
    """

    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="Port to listen on; 0 takes a free one.")] = 8321
    api_keys: tuple[ApiKey, ...] = ()
    api_key_file: Annotated[
        str | None, Meta(description="File of API keys: lines of SECRET, or of TENANT:SECRET.")
    ] = None
    no_auth: Annotated[
        bool, Meta(description="Serve other machines too without asking for a key.")
    ] = False
    allowed_hosts: Annotated[
        tuple[str, ...], Meta(description="A further name of this server: NAME, *.NAME, or *.")
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...], Meta(description="A page that may call: its SCHEME://HOST:PORT, or *.")
    ] = ()
    ssl_certfile: Annotated[str | None, Meta(description="Certificate, for HTTPS.")] = None
    ssl_keyfile: Annotated[str | None, Meta(description="Key of the certificate.")] = None
    default_tokens: Annotated[
        Count | None, Meta(description="Tokens of a reply unless a request says how many.")
    ] = None
    temperature: Annotated[
        float, Meta(ge=0, le=100, description="Temperature unless a request says which.")
    ] = 1.0
    max_body: Annotated[Bytes, Meta(description="Most bytes of a request.")] = 32 << 20
    max_lanes: Annotated[Count, Meta(description="Most lanes of one WebSocket.")] = 1024
    max_connections: Annotated[Count, Meta(description="Most connections at a time.")] = 1024
    header_seconds: Annotated[Seconds, Meta(description="Time to send a request's headers.")] = 10.0
    body_seconds: Annotated[Seconds, Meta(description="Time to send a request's body.")] = 60.0
    ping_seconds: Annotated[Seconds, Meta(description="Time between signs of life.")] = 10.0
    outbox_bytes: Annotated[
        Bytes, Meta(description="Most bytes that wait for a client to read them.")
    ] = 4 << 20
    stall_seconds: Annotated[
        Seconds, Meta(description="Time after which a client that does not read is given up.")
    ] = 30.0
    ring_events: Annotated[
        Count, Meta(description="Events by which a response can be resumed.")
    ] = 4096
    store_bytes: Annotated[Bytes, Meta(description="Most bytes of stored responses.")] = 256 << 20
    drain_seconds: Annotated[
        float, Meta(ge=0, description="Time that running turns have after a signal to end.")
    ] = 30.0
    model: Annotated[
        str, Meta(description="A Hub id, a folder, a .gguf file, or smollm2-135m.")
    ] = ""
    ram: Annotated[int | str, Meta(description="Most memory of the prompt cache.")] = "2GiB"
    memory: Annotated[
        int | str | None, Meta(description="Most memory of weights, cache and requests.")
    ] = None
    cold: Annotated[
        str | None, Meta(description="Folder in which prompts are kept beyond RAM and restarts.")
    ] = None
    cold_limit: Annotated[int | str, Meta(description="Most bytes in that folder.")] = "20GiB"
    dtype: Annotated[str | None, Meta(description="Type of the weights.")] = None
    wired: Annotated[bool, Meta(description="Keep as much in memory as Metal recommends.")] = False
    max_rows: Annotated[Count, Meta(description="Most requests that run at a time.")] = 32
    max_queue: Annotated[Count, Meta(description="Most requests that wait.")] = 1024
    prefill_chunk: Annotated[
        Count | None, Meta(description="Most prompt tokens between two decode steps.")
    ] = None
    idle_unload: Annotated[
        Seconds | None, Meta(description="Time after which an unused model leaves memory.")
    ] = None
    draft_tokens: Annotated[
        Count, Meta(description="Tokens that a draft model proposes at a time.")
    ] = 3
    trace: Annotated[str | None, Meta(description="File for the trace's events.")] = None
    models: Annotated[dict[str, str], Meta(description="A further model, as NAME=MODEL.")] = {}
    adapters: Annotated[
        dict[str, str | Adapter], Meta(description="An adapter of the first model: NAME=FOLDER.")
    ] = {}
    aliases: Annotated[
        dict[str, str], Meta(description="One more name of a model, as NAME=EXISTING.")
    ] = {}

    def broker_options(self) -> dict[str, Any]:
        """What a `Broker` takes besides the model."""
        return {name: getattr(self, name) for name in BROKER}


BROKER = (
    "ram",
    "memory",
    "cold",
    "cold_limit",
    "dtype",
    "wired",
    "max_rows",
    "max_queue",
    "prefill_chunk",
    "idle_unload",
    "draft_tokens",
    "trace",
)
