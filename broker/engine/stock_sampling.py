"""A row's sampling as mlx-lm's generators take it."""

from collections import deque
from typing import Any, NamedTuple

import mlx.core as mx

from ..request import TokenLogprob
from .logprobs import StepLogprobs, step_logprobs
from .row import Row
from .sampling import RowSampler


class StockSampling(NamedTuple):
    """`watcher` sees the log-probabilities of a row that asks for them; None for others."""

    sampler: Any
    processors: list[Any]
    watcher: "Watcher | None"


class Watcher:
    """Sees a row's logits as the model made them and the tokens chosen, and keeps what it asks for.

    The log-probabilities that mlx-lm gives are rounded to the model's dtype. `seen` has the steps
    that were sampled and whose tokens were not read yet.
    """

    def __init__(self, sampler: Any, count: int) -> None:
        self._sampler = sampler
        self._count = count
        self._logits: mx.array
        self.seen: deque[StepLogprobs] = deque()

    def process(self, _: Any, logits: mx.array) -> mx.array:
        """A logits processor of mlx-lm that changes nothing: logits `[1, vocabulary]`."""
        self._logits = logits
        return logits

    def sample(self, logprobs: mx.array) -> mx.array:
        """The row's sampler: token `[1]`."""
        token: mx.array = self._sampler(logprobs)
        self.seen.append(step_logprobs(self._logits, token, [self._count]))
        del self._logits
        return token

    def next(self, token: int) -> TokenLogprob | None:
        """The log-probability of the oldest token that was not read."""
        return self.seen.popleft().read([token])[0]


def stock_sampling(row: Row) -> StockSampling:
    """What a generator of mlx-lm that goes through a row token by token is given."""
    watcher = None if row.top_logprobs is None else Watcher(row.sampler, row.top_logprobs)
    processors: list[Any] = [watcher.process] if watcher else []
    if isinstance(row.sampler, RowSampler) and row.sampler.penalties is not None:
        processors.append(row.sampler.process)
    if row.grammar is not None:
        processors.append(row.grammar.process)
    return StockSampling(watcher.sample if watcher else row.sampler, processors, watcher)
