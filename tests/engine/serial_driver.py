"""The serial lane without a loop: a row at a time, in the test's own thread."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import greedy_sampler

from mlx_swarm.broker import Request
from mlx_swarm.broker.cache.prompt_cache import PromptCache
from mlx_swarm.broker.engine.admission import Admission
from mlx_swarm.broker.engine.batch import BatchLane
from mlx_swarm.broker.engine.drafts import NO_DRAFTS
from mlx_swarm.broker.engine.row import Row, RowToken
from mlx_swarm.broker.engine.serial import DRAFT_TOKENS, SerialLane
from mlx_swarm.broker.engine.submission import Submission
from mlx_swarm.broker.models import LoadedModel
from mlx_swarm.broker.request import RequestId
from tests.engine.driver import Box


class SerialDriver:
    """A serial lane over a prompt cache, and the calls that the loop would make."""

    def __init__(
        self,
        model: LoadedModel,
        drafts: Mapping[str, LoadedModel] = NO_DRAFTS,
        *,
        ram: int = 64 << 20,
        chunk: int = 32,
        draft_tokens: int = DRAFT_TOKENS,
    ) -> None:
        self.cache = PromptCache(ram)
        self.batch = BatchLane(model, self.cache, 4)
        self.lane = SerialLane(
            model,
            self.cache,
            self.batch.row_caches,
            self.batch.layout,
            self.batch.ahead,
            drafts,
            draft_tokens,
        )
        self._admission = Admission(model, drafts)
        self._chunk = chunk
        self._count = 0

    def row(self, request: Request) -> Row:
        """The row of a request, checked as the engine checks it."""
        request.validate()
        self._count += 1
        box: Any = Box()
        return self._admission.row_for(
            Submission(RequestId(f"request-{self._count}"), request, box, 0.0), self.lane
        )

    def opened(self, request: Request) -> Row:
        """A row with its caches."""
        row = self.row(request)
        self.lane.open(row)
        return row

    def prefill(self, row: Row) -> list[int]:
        """Compute all of the prompt; the positions that this went through."""
        positions = []
        while row.position < len(row.prompt) - 1:
            stop = min(row.position + self._chunk, len(row.prompt) - 1)
            self.lane.prefill(row, stop)
            positions.append(row.position)
        return positions

    def joined(self, request: Request) -> Row:
        """A row that decodes."""
        row = self.opened(request)
        self.prefill(row)
        self.lane.join(row)
        return row

    def decode(self, tokens: int = 1 << 30) -> list[RowToken]:
        """Steps until the running row has so many tokens more, or ends."""
        received: list[RowToken] = []
        while self.lane.running and len(received) < tokens:
            received += self.lane.step()
        return received

    def finish(self, row: Row) -> list[RowToken]:
        """All tokens of a row that has its caches."""
        self.prefill(row)
        self.lane.join(row)
        return self.decode()

    def end(self, row: Row, how: str) -> int:
        """`keep` or `discard` a row; how many tokens were kept."""
        if how == "keep":
            return self.lane.keep(row)
        self.lane.discard(row)
        return 0

    def run(self, request: Request) -> list[RowToken]:
        """All tokens of a request, whose row is kept at the end."""
        row = self.opened(request)
        received = self.finish(row)
        self.lane.keep(row)
        self.check_idle()
        return received

    def check_idle(self) -> None:
        """Assert that nothing of any row is left, and that the cache is sound."""
        self.lane.check_integrity()
        self.cache.check_integrity()
        assert not self.lane.rows
        assert self.cache.statistics().leases == 0
        assert self.cache.total_bytes <= self.cache.max_bytes


class Alone(NamedTuple):
    """What `generate_step` gives: tokens, and its log-probabilities [vocabulary] for each."""

    tokens: list[int]
    logprobs: list[mx.array]


def alone(
    model: LoadedModel, prompt: Sequence[int], max_tokens: int, sampler: Any = greedy_sampler
) -> Alone:
    """mlx-lm without anything of ours; an end token is the last."""
    tokens, logprobs = [], []
    steps = generate_step(
        mx.array(list(prompt)), model.model, max_tokens=max_tokens, sampler=sampler
    )
    for token, row in steps:
        tokens.append(int(token))
        logprobs.append(row)
        if token in model.tokenizer.eos_token_ids:
            break
    steps.close()
    return Alone(tokens, logprobs)


def tokens_of(received: Sequence[RowToken]) -> list[int]:
    """The tokens alone."""
    return [each.token for each in received]
