"""What the scheduler asks the engine to do next. No MLX."""

from typing import NamedTuple, Protocol

from ..request import RequestId
from ..trace.events import PreemptionReason


class LanePolicy(Protocol):
    """What the scheduler has to know of a lane. Two are one if they are the same object.

    With `exact_stops` (models whose state serves one length only) no stop is left out for a later
    one nearby. A lane that `donates` can store rows that decode at any time. One that `preempts`
    can interrupt its rows, and go on with them later.
    """

    @property
    def max_rows(self) -> int:
        """Rows that it takes at a time."""

    @property
    def exact_stops(self) -> bool: ...
    @property
    def donates(self) -> bool: ...
    @property
    def preempts(self) -> bool: ...
    def chunk(self, decoding: bool) -> int:
        """Prompt tokens to compute at once: while rows decode, between two steps."""


class Admit(NamedTuple):
    """Take what memory has for this request; answer with `admitted`, or `ended` if that failed."""

    request: RequestId
    not_worth_waiting: bool


class Wait(NamedTuple):
    """This request now waits until its leader has stored `shared_tokens` of its prompt."""

    request: RequestId
    leader: RequestId
    shared_tokens: int


class Hold(NamedTuple):
    """It is this request's turn, but it lacks memory: so many others wait behind it."""

    request: RequestId
    others: int


class Preempt(NamedTuple):
    """This request, which runs, gives its place to another; answer with `preempted`, or `ended` if
    that failed.
    """

    request: RequestId
    for_: RequestId
    reason: PreemptionReason


class Expire(NamedTuple):
    """This request is past its deadline; answer with `ended`."""

    request: RequestId


class Part(NamedTuple):
    """Prompt tokens [start, stop) of a request."""

    request: RequestId
    start: int
    stop: int


class Prefill(NamedTuple):
    """Compute these parts, of different requests of one lane; answer with `prefilled` for each."""

    parts: tuple[Part, ...]


class Store(NamedTuple):
    """Put what this request has computed; answer with `stored`. Its
    first `shared_tokens` are what others want of it.
    """

    request: RequestId
    shared_tokens: int


class Decode(NamedTuple):
    """One token for every running row of a lane."""

    lane: LanePolicy


Work = Admit | Wait | Hold | Preempt | Expire | Prefill | Store | Decode
