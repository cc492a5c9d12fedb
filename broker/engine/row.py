"""One request on its way through the engine."""

from typing import Any

from msgspec import Struct

from ..cache.lease import PromptLease
from ..cache.ledger import Reservation
from ..cache.plan import Plan
from ..cache.prefix_hash import Tokens
from ..models import LoadedModel
from ..request import Request, RequestId, TokenLogprob, Usage
from .grammar import GrammarState
from .lane import Lane
from .mailbox import Mailbox
from .prompt_logprobs import PromptLogprobs
from .text import TextStream


class DraftKV:
    """What a row's draft model holds of it: KV of the prompt's first `position` tokens."""

    def __init__(
        self, row_id: RequestId, model: LoadedModel, namespace: str, *, reads_cache: bool
    ) -> None:
        self.id = row_id
        self.model = model
        self.namespace = namespace
        self.reads_cache = reads_cache
        self.lease: PromptLease | None = None
        self.prompt_logprobs: PromptLogprobs | None = None
        self.caches: list[Any] = []
        self.position = 0


class Row:
    """What the engine knows of one request: prompt, KV, output, and when things happened.

    `lane` is where it runs; `ends` are the tokens that end its output and are no text. `position`
    counts the prompt tokens whose KV is there, in `caches`, in the batch, or only in the
    lease; `stored` those of them that were put. Times are on the recorder's clock.
    """

    def __init__(
        self,
        request_id: RequestId,
        request: Request,
        mailbox: Mailbox,
        *,
        prompt: Tokens,
        boundaries: tuple[int, ...],
        namespace: str,
        max_tokens: int,
        sampler: Any,
        text: TextStream,
        submitted: float,
        lane: Lane,
        ends: frozenset[int] = frozenset(),
        grammar: GrammarState | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None:
        self.id = request_id
        self.request = request
        self.mailbox = mailbox
        self.prompt = prompt
        self.boundaries = boundaries
        self.namespace = namespace
        self.max_tokens = max_tokens
        self.sampler = sampler
        self.grammar = grammar
        self.lane = lane
        self.ends = ends
        self.prompt_logprobs = prompt_logprobs
        self.text = text
        self.plan: Plan | None = None
        self.lease: PromptLease | None = None
        self.memory: Reservation | None = None
        self.draft: DraftKV | None = None
        self.caches: list[Any] = []
        self.position = 0
        self.stored = 0
        self.ram_tokens = 0
        self.cold_tokens = 0
        self.output: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.submitted = submitted
        self.admitted: float | None = None
        self.joined: float | None = None
        self.first_token: float | None = None

    @property
    def deadline(self) -> float | None:
        """When the row has to be over."""
        seconds = self.request.deadline
        return None if seconds is None else self.submitted + seconds

    @property
    def reads_cache(self) -> bool:
        """Whether the row takes from the prompt cache and puts into it."""
        return self.request.cache and not self.request.deterministic

    @property
    def runs_alone(self) -> bool:
        """Whether the row needs the serial lane, whatever the model's caches are."""
        return self.request.deterministic or bool(self.request.draft)

    @property
    def leases(self) -> int:
        """How many leases the row holds: its own, and that of its draft model."""
        return sum(each is not None and each.lease is not None for each in (self, self.draft))

    @property
    def top_logprobs(self) -> int | None:
        """How many alternatives come with a token's log-probability; None if it asks for none."""
        return self.request.top_logprobs if self.request.logprobs else None

    @property
    def lacking_alternatives(self) -> int | None:
        """How many alternatives come with the log-probabilities of the prompt that are still to be
        computed; None if there are none.
        """
        asked = self.prompt_logprobs
        return None if asked is None or asked.is_complete else asked.alternatives

    def usage(self, now: float) -> Usage:
        """What the row has cost until `now`; prompt tokens not reached are not counted."""
        admitted = now if self.admitted is None else self.admitted
        joined = now if self.joined is None else self.joined
        # The last prompt token is forwarded by the first decode step.
        reached = self.position if not self.output else len(self.prompt)
        return Usage(
            requests=1,
            prompt_tokens=reached,
            ram_tokens=self.ram_tokens,
            cold_tokens=self.cold_tokens,
            prefilled_tokens=reached - self.ram_tokens - self.cold_tokens,
            output_tokens=len(self.output),
            queue_seconds=admitted - self.submitted,
            prefill_seconds=joined - admitted,
            decode_seconds=now - joined,
        )


class RowToken(Struct, frozen=True):
    """One output token of a row. `finish_reason` is set with the row's last one, `logprob` if the
    row asks for it.
    """

    row: Row
    token: int
    finish_reason: str | None
    logprob: TokenLogprob | None = None
