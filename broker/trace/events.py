"""What happens to requests and to the cache, as frozen, versioned records. No MLX.

`time` is in seconds on the clock of the recorder; `TraceStarted` ties that clock to the wall clock.
Token positions count from the start of the prompt. A field may be added within a version; a changed
or removed one makes a new `TRACE_VERSION`.
"""

from typing import Literal, get_args

import msgspec
from msgspec import Struct

TRACE_VERSION = 1

MissReason = Literal[
    "cold_start",
    "diverged",
    "no_checkpoint",
    "no_logprobs",
    "window_gone",
    "evicted",
    "namespace",
    "below_minimum",
    "cost_gate",
    "restore_failed",
    "not_worth_waiting",
]


PreemptionReason = Literal["priority", "slice", "memory"]


class Divergence(Struct, frozen=True):
    """Where a prompt leaves the deepest stored path: the two tokens at `index`."""

    index: int
    stored: int
    wanted: int


class Event(Struct, frozen=True, kw_only=True, tag_field="event", tag=True):
    """Base of all trace events."""

    time: float


class TraceStarted(Event, frozen=True):
    """The first record of a trace."""

    version: int
    wall_time: float
    model: str
    backend: str


class Queued(Event, frozen=True):
    """A request arrived. It was `submitted` then; a busy engine takes note of it a little later.

    `deadline` is in seconds from then. `others` were queued already. Without a `model` it is the
    broker's first.
    """

    submitted: float
    request: str
    agent: str
    swarm: str
    namespace: str
    prompt_tokens: int
    max_tokens: int
    tenant: str = ""
    priority: int = 0
    deadline: float | None = None
    others: int = 0
    model: str = ""


class Waiting(Event, frozen=True):
    """A request waits for `leader`, which is computing `shared_tokens` of the same prompt."""

    request: str
    leader: str
    shared_tokens: int


class Held(Event, frozen=True):
    """It is a request's turn, but it needs more bytes than are available: it is the next of its
    priority from now on, and `others` wait with it.
    """

    request: str
    need: int
    available: int
    others: int


class Deferred(Event, frozen=True):
    """It is a request's turn, but its agent's session is not among those whose KV fits into memory
    together, or has grown too large for that: it would add `need` bytes to the `held` ones, of
    which there may be `budget`. Others go on.
    """

    request: str
    need: int
    held: int
    budget: int


class Displaced(Event, frozen=True):
    """The session of an agent that rests lost its place in memory to the one of a request."""

    agent: str
    swarm: str
    tenant: str
    request: str


class PinRefused(Event, frozen=True):
    """What an agent said last cannot be kept in memory while it waits: too much is kept already."""

    agent: str
    swarm: str
    tenant: str
    error: str


class Admitted(Event, frozen=True):
    """A request's turn came after so many seconds in the queue, with `others` still there; again
    after each time that it was preempted.

    What its tenant, swarm and agent had attained is in tokens, each on the scale of its kind, where
    newcomers begin at the average: those with least are next.
    """

    request: str
    seconds: float
    priority: int
    tenant_tokens: int
    swarm_tokens: int
    agent_tokens: int
    others: int


class Planned(Event, frozen=True):
    """Where the prompt's tokens come from. prompt = ram + cold + prefilled.

    `reason` says why the hit ended where it did; it is None when only the last token is left to
    compute.
    """

    request: str
    prompt_tokens: int
    ram_tokens: int
    cold_tokens: int
    prefilled_tokens: int
    donor: str | None
    reason: MissReason | None
    divergence: Divergence | None = None


class Preempted(Event, frozen=True):
    """A request that ran gave its place to the request `by`, which is of a higher priority or whose
    agent is a slice behind, or to nobody where memory ran short. It had answered with
    `output_tokens`, and is queued again; `kept_tokens` of what it had computed were stored.
    """

    request: str
    by: str
    reason: PreemptionReason
    output_tokens: int
    kept_tokens: int


class Resumed(Event, frozen=True):
    """A preempted request goes on after `output_tokens`. These and its prompt come from where it
    says, prompt + output = ram + cold + prefilled; `reason` is as in `Planned`.
    """

    request: str
    output_tokens: int
    ram_tokens: int
    cold_tokens: int
    prefilled_tokens: int
    reason: MissReason | None


class PrefillChunk(Event, frozen=True):
    """Prompt tokens [start, stop) were computed."""

    request: str
    start: int
    stop: int
    seconds: float


class FirstToken(Event, frozen=True):
    """The first output token exists."""

    request: str


class DecodeStep(Event, frozen=True):
    """One decode step of a lane; `rows` requests of a model got one token each, or, where a draft
    model proposes them, several.
    """

    rows: int
    seconds: float
    model: str = ""


class Shared(Event, frozen=True):
    """What a batch reads together from now on: for each span its tokens, and how many of the `rows`
    read it.
    """

    rows: int
    spans: tuple[tuple[int, int], ...]
    model: str = ""


class Put(Event, frozen=True):
    """A token sequence was stored; `new_tokens` of it were not there before."""

    entry: str
    namespace: str
    tokens: int
    new_tokens: int
    bytes: int
    request: str | None = None


class Split(Event, frozen=True):
    """A node was split at `at` because another sequence diverges there. Nothing was copied."""

    entry: str
    namespace: str
    at: int


class Evicted(Event, frozen=True):
    """A leaf left memory."""

    entry: str
    namespace: str
    tokens: int
    bytes: int


class Spilled(Event, frozen=True):
    """A sequence is in the cold tier and would survive a crash, `seconds` after it was begun."""

    entry: str
    namespace: str
    tokens: int
    bytes: int
    seconds: float


class Demoted(Event, frozen=True):
    """A leaf left memory; the cold tier or a sink has it."""

    entry: str
    namespace: str
    tokens: int
    bytes: int


class Restored(Event, frozen=True):
    """`tokens` of a sequence of `length` were read from the cold tier: memory lacked them."""

    entry: str
    namespace: str
    tokens: int
    length: int
    bytes: int
    seconds: float


class Quarantined(Event, frozen=True):
    """Something in the cold tier was corrupt and is kept out of use."""

    entry: str
    namespace: str
    bytes: int
    error: str


class Pressure(Event, frozen=True):
    """Memory ran short or no longer does: the level went from `before` to `level` (normal, soft,
    hard). Bytes: MLX's own, in use and kept for later; what the process takes; what it may take;
    and what of it the prompt cache holds.
    """

    level: str
    before: str
    active: int
    pool: int
    footprint: int
    limit: int
    cache: int


class ModelLoaded(Event, frozen=True):
    """A model came into memory, with so many bytes of weights of its own; `base` is what it is an
    adapter of.
    """

    model: str
    base: str
    weights: int
    seconds: float


class ModelUnloaded(Event, frozen=True):
    """A model left memory: somebody asked for that (`asked`), nobody used it (`idle`), or others
    needed the memory (`memory`).
    """

    model: str
    reason: str


class Finished(Event, frozen=True):
    """A request ended by itself."""

    request: str
    finish_reason: str
    output_tokens: int


class Cancelled(Event, frozen=True):
    """A request was cancelled; what it had computed was kept if `kept_tokens` > 0."""

    request: str
    output_tokens: int
    kept_tokens: int


class Failed(Event, frozen=True):
    """A request ended with an error."""

    request: str
    error: str


TraceEvent = (
    TraceStarted
    | Queued
    | Waiting
    | Held
    | Deferred
    | Displaced
    | PinRefused
    | Admitted
    | Planned
    | Preempted
    | Resumed
    | PrefillChunk
    | FirstToken
    | DecodeStep
    | Shared
    | Put
    | Split
    | Evicted
    | Spilled
    | Demoted
    | Restored
    | Quarantined
    | Pressure
    | ModelLoaded
    | ModelUnloaded
    | Finished
    | Cancelled
    | Failed
)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(TraceEvent)


def encode(event: Event) -> bytes:
    """One event as a line of JSON, without the newline."""
    return _encoder.encode(event)


def decode(line: bytes | str) -> TraceEvent:
    """The event of a line. Raises `msgspec.ValidationError` for anything that is not one."""
    return _decoder.decode(line)


def miss_reasons() -> tuple[str, ...]:
    """All reasons, in the order in which the documentation lists them."""
    return get_args(MissReason)
