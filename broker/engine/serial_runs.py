"""One row in a generator of mlx-lm."""

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step

from ..cache.prefix_hash import Tokens
from ..models import LoadedModel
from ..request import FinishReason
from .row import Row, RowToken
from .stock_sampling import stock_sampling


class Run(Protocol):
    """The decoding of one row, whose prompt is computed up to its last token."""

    @property
    def ended(self) -> bool:
        """Whether the row has got its last token, or `next` has raised."""
        ...

    @property
    def forwarded(self) -> Tokens:
        """The tokens that the row's caches hold once the run is closed; none after a failure."""
        ...

    def next(self) -> list[RowToken]:
        """The row's next tokens; there may be none yet."""
        ...

    def close(self) -> None:
        """End the generator. Doing so again is harmless."""
        ...


class Output:
    """The tokens that a row has got, and why one is its last."""

    def __init__(self, row: Row, ends: Sequence[int]) -> None:
        self._row = row
        self._ends = frozenset(ends)
        self.tokens: list[int] = []
        self.ended = False

    def take(self, token: int) -> FinishReason | None:
        """Note the next token; the finish reason if it is the last."""
        self.tokens.append(token)
        row = self._row
        reason: FinishReason | None = None
        finished = row.grammar is not None and row.grammar.finished
        if token in self._ends or finished:
            reason = "stop"
        elif len(self.tokens) == row.max_tokens:
            reason = "length"
        self.ended = reason is not None
        return reason

    def with_prompt(self, length: int) -> Tokens:
        """The first `length` tokens of prompt and output."""
        output = np.array(self.tokens, np.uint32)
        return np.concatenate([self._row.prompt, output])[:length]


class PlainRun:
    """A row in `generate_step`, which is always one token ahead."""

    def __init__(self, row: Row, model: LoadedModel) -> None:
        self._row = row
        self._output = Output(row, model.tokenizer.eos_token_ids)
        self._failed = False
        sampler, processors, self._watcher = stock_sampling(row)
        self._generator: Any = generate_step(
            mx.array(row.prompt[-1:]),
            model.model,
            # One stream for everything, so that what is put or taken is ordered with the steps.
            stream=mx.default_stream(mx.default_device()),
            max_tokens=row.max_tokens,
            sampler=sampler,
            logits_processors=processors,
            prompt_cache=row.caches,
        )

    @property
    def ended(self) -> bool:
        """Whether the row has got its last token, or `next` has raised."""
        return self._failed or self._output.ended

    @property
    def forwarded(self) -> Tokens:
        """Prompt and output; before the first token all of the prompt but its last one."""
        given, prompt = len(self._output.tokens), len(self._row.prompt)
        length = prompt + given if given else prompt - 1
        return self._output.with_prompt(0 if self._failed else length)

    def next(self) -> list[RowToken]:
        """The next token; the one after it is under way when this returns."""
        try:
            token, _ = next(self._generator)
            logprob = self._watcher.next(token) if self._watcher else None
        except BaseException:
            self._failed = True
            raise
        return [RowToken(self._row, token, self._output.take(token), logprob)]

    def close(self) -> None:
        """End the generator. Doing so again is harmless."""
        self._generator.close()
