"""Log-probabilities of chosen tokens, for the rows of a step that ask for them.

They are the model's own: the log-softmax of a row's logits in float32, whatever the model computes
in, before temperature and filters. Only asking rows are gathered, and never normalised as a whole.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..request import MAX_TOP_LOGPROBS, TokenLogprob

BUCKETS = (5, MAX_TOP_LOGPROBS)
"""How many alternatives are computed, so that few shapes are seen; rows are given fewer."""


class StepLogprobs(NamedTuple):
    """What a step computes for its asking rows, to be evaluated and read with its tokens.

    `counts` has for each row of the step how many alternatives it wants, None for a row that does
    not ask. `arrays` is empty if none asks; else it holds the log-probabilities of the chosen
    tokens `[asking]`, and if any alternatives are wanted their ids and log-probabilities
    `[asking, bucket]`, in no order.
    """

    counts: Sequence[int | None]
    arrays: list[mx.array]

    def read(self, tokens: Sequence[int]) -> list[TokenLogprob | None]:
        """For each row its chosen token's log-probability; waits for the step."""
        if not self.arrays:
            return [None] * len(tokens)
        columns: list[Any] = [array.tolist() for array in self.arrays]
        asking = zip(*columns, strict=True)
        return [
            None if count is None else _item(token, count, *next(asking))
            for token, count in zip(tokens, self.counts, strict=True)
        ]


def step_logprobs(logits: mx.array, tokens: mx.array, counts: Sequence[int | None]) -> StepLogprobs:
    """The log-probabilities of the tokens `[rows]` chosen from logits `[rows, vocabulary]`."""
    asking = [row for row, count in enumerate(counts) if count is not None]
    if not asking:
        return StepLogprobs(counts, [])
    if len(asking) < len(counts):
        rows = mx.array(asking)
        logits, tokens = logits[rows], tokens[rows]
    logits = logits.astype(mx.float32)
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1) - total
    arrays = [mx.squeeze(chosen, -1)]
    most = max(count for count in counts if count is not None)
    if most:
        ids = _highest(logits, next(bucket for bucket in BUCKETS if bucket >= most))
        arrays += [ids, mx.take_along_axis(logits, ids, axis=-1) - total]
    return StepLogprobs(counts, arrays)


def _highest(logits: mx.array, count: int) -> mx.array:
    """The ids of the `count` highest logits of each row, or of all if there are no more."""
    first = max(logits.shape[-1] - count, 0)
    return mx.argpartition(logits, kth=first, axis=-1)[:, first:]


def _item(
    token: int,
    count: int,
    logprob: float,
    ids: Sequence[int] = (),
    logprobs: Sequence[float] = (),
) -> TokenLogprob:
    ranked = sorted(zip(ids, logprobs, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprob(token, logprob, tuple(ranked[:count]))
