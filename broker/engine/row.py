"""One request on its way through the engine."""

from typing import Any

import numpy as np
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
from .sampling import RowSampler
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

    `lane` is where it runs; `ends` are the tokens that end its output and are no text. `sequence`
    are the tokens to compute before its next output: the prompt, and what the row had answered when
    it was last preempted. `position` counts those of them whose KV is there, in `caches`, in the
    batch, or only in the lease; `stored` those that were put; `reached` how many there ever were;
    `kept` those that were put when it was preempted, until it goes on.
    Times are on the recorder's clock.
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
        self.prompt = self.sequence = prompt
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
        self.reached = 0
        self.kept = 0
        self.opened = False
        self.ram_tokens = 0
        self.cold_tokens = 0
        self.output: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.submitted = self.queued = submitted
        self.admitted: float | None = None
        self.joined: float | None = None
        self.first_token: float | None = None
        self._begun_at = 0
        self._spent = Usage()

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

    @property
    def asking(self) -> PromptLogprobs | None:
        """Who is to be told the log-probabilities of what is computed, which is prompt until there
        is output.
        """
        return None if self.output else self.prompt_logprobs

    @property
    def left(self) -> int:
        """Output tokens that may come after `sequence`."""
        return self.max_tokens - (len(self.sequence) - len(self.prompt))

    def take(self, lease: PromptLease | None) -> None:
        """Begin, or go on, with what the cache has. Of the prompt counts as cached what nothing was
        known of before.
        """
        self.opened, self.lease, self.kept = True, lease, 0
        if lease is None:
            return
        self.position = self.stored = self._begun_at = lease.length
        found = min(lease.length, len(self.prompt))
        cold = max(0, found - max(self.reached, lease.ram_tokens))
        self.ram_tokens += max(0, found - self.reached) - cold
        self.cold_tokens += cold

    def suspend(self, now: float, kept: int) -> None:
        """Give up the lane, which has let go of the row and kept so many tokens, to go on later
        where it is now.
        """
        self.kept = kept
        self._spent = self._costs(now)
        self.sequence = np.concatenate([self.prompt, np.array(self.output, self.prompt.dtype)])
        # A decode step forwards the last one, and does so again.
        self.reached = len(self.sequence) - 1 if self.output else max(self.reached, self.position)
        self.position = self.stored = self._begun_at = 0
        self.plan = None
        self.queued, self.admitted, self.joined = now, None, None
        if isinstance(self.sampler, RowSampler):
            self.sampler.rewind(self.sequence, len(self.output))
        if self.grammar is not None:
            self.grammar.rejoin()

    def usage(self, now: float) -> Usage:
        """What the row has cost until `now`; prompt tokens not reached are not counted."""
        # The last prompt token is forwarded by the first decode step.
        is_whole = bool(self.output)
        reached = len(self.prompt) if is_whole else max(self.reached, self.position)
        return self._costs(now) + Usage(
            requests=1,
            prompt_tokens=reached,
            ram_tokens=self.ram_tokens,
            cold_tokens=self.cold_tokens,
            prefilled_tokens=reached - self.ram_tokens - self.cold_tokens,
            output_tokens=len(self.output),
        )

    def _costs(self, now: float) -> Usage:
        """What adds up over the times that the row has run."""
        admitted = now if self.admitted is None else self.admitted
        joined = now if self.joined is None else self.joined
        again = min(self.position, self.reached) - self._begun_at
        return self._spent + Usage(
            recomputed_tokens=max(0, again),
            queue_seconds=admitted - self.queued,
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
