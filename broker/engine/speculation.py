"""One row in mlx-lm's speculation: a draft model proposes tokens, the model checks them at once.

A token is taken where it is what the model's own sampler chooses there. Our samplers are functions
of the tokens so far and of the index, so the output is that of the model alone, sampled or not.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.generate import speculative_generate_step

from ..cache.prefix_hash import Tokens
from ..models import LoadedModel
from ..request import TokenLogprob
from .ahead import arrays_of
from .logprobs import step_logprobs
from .penalties import penalise
from .row import DraftKV, Row, RowToken
from .sampling import RowSampler, draw, fold
from .serial_runs import Output

DRAFT_PIECE = 512
"""Prompt tokens that a draft model computes in one step."""


class DraftCounts:
    """How many rounds there were, and how many tokens were proposed and taken in them."""

    rounds = 0
    drafted = 0
    accepted = 0


class SpeculativeRun:
    """A row in `speculative_generate_step`, a round at a time.

    The draft model computes what it lacks of the prompt first, a piece a step. A round leaves
    rejected tokens in the caches until the next one begins or the generator is closed.
    """

    def __init__(
        self,
        row: Row,
        draft_kv: DraftKV,
        model: LoadedModel,
        draft_tokens: int,
        counts: DraftCounts,
    ) -> None:
        self._row = row
        self._draft_kv = draft_kv
        self._draft_tokens = draft_tokens
        self._counts = counts
        self._output = Output(row, model.tokenizer.eos_token_ids)
        self._failed = False
        self._held = self._held_by_draft = len(row.prompt) - 1
        self._watched = None if row.top_logprobs is None else Watched(model.model)
        sampler, processors = row.sampler, []
        if isinstance(sampler, RowSampler):
            positioned = PositionedSampler(sampler)
            sampler, processors = positioned, [positioned.process]
        self._generator: Any = speculative_generate_step(
            mx.array(row.prompt[-1:]),
            self._watched or model.model,
            draft_kv.model.model,
            stream=mx.default_stream(mx.default_device()),
            num_draft_tokens=draft_tokens,
            max_tokens=row.max_tokens,
            sampler=sampler,
            logits_processors=processors,
            prompt_cache=[*row.caches, *draft_kv.caches],
        )

    @property
    def ended(self) -> bool:
        """Whether the row has got its last token, or `next` has raised."""
        return self._failed or self._output.ended

    @property
    def forwarded(self) -> Tokens:
        """The tokens that the model's caches hold once this is closed."""
        return self._output.with_prompt(0 if self._failed else self._held)

    @property
    def forwarded_by_draft(self) -> Tokens:
        """The tokens that the draft model's caches hold then."""
        prompt_held = self._draft_kv.position
        held = self._held_by_draft if prompt_held == len(self._row.prompt) - 1 else prompt_held
        return self._output.with_prompt(0 if self._failed else held)

    def next(self) -> list[RowToken]:
        """The tokens of the next round; none while the draft model lacks some of the prompt."""
        try:
            if self._draft_kv.position < len(self._row.prompt) - 1:
                self._catch_up()
                return []
            return self._round()
        except BaseException:
            self._failed = True
            raise

    def close(self) -> None:
        """End the generator, which takes rejected tokens off. Doing so again is harmless."""
        self._generator.close()

    def _catch_up(self) -> None:
        held, prompt = self._draft_kv, self._row.prompt
        stop = min(held.position + DRAFT_PIECE, len(prompt) - 1)
        held.model.model(mx.array(prompt[held.position : stop])[None], cache=held.caches)
        mx.eval(arrays_of(held.caches))
        held.position = stop

    def _round(self) -> list[RowToken]:
        output, row = self._output, self._row
        proposed = min(row.max_tokens - len(output.tokens), self._draft_tokens)
        taken, accepted = [], 0
        is_drafted = True
        while is_drafted and not output.ended:
            token, _, is_drafted = next(self._generator)
            accepted += is_drafted
            taken.append((token, output.take(token)))
        # The model's own token was not forwarded yet, nor the last that was proposed by the draft.
        self._held = len(row.prompt) + len(output.tokens) - (not is_drafted)
        self._held_by_draft = self._held - (accepted == proposed)
        self._counts.rounds += 1
        self._counts.drafted += proposed
        self._counts.accepted += accepted
        logprobs = self._logprobs([token for token, _ in taken])
        return [
            RowToken(row, token, reason, logprob)
            for (token, reason), logprob in zip(taken, logprobs, strict=True)
        ]

    def _logprobs(self, tokens: list[int]) -> list[TokenLogprob | None]:
        counts = [self._row.top_logprobs] * len(tokens)
        if self._watched is None:
            return [None] * len(tokens)
        logits = self._watched.logits[0, : len(tokens)]
        return step_logprobs(logits, mx.array(tokens), counts).read(tokens)


class PositionedSampler:
    """A row's sampler where tokens are tried that may not last: nothing of it changes.

    `process` is a logits processor of mlx-lm; the call after it draws for the same place.
    """

    def __init__(self, sampler: RowSampler) -> None:
        self._sampler = sampler
        self._first = sampler.index
        self._index = sampler.index

    def process(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """The logits [1, vocabulary] after the prompt's last token and some output `[tokens]`."""
        self._index = self._first + tokens.size - 1
        penalties = self._sampler.penalties
        return logits if penalties is None else penalise(logits, [penalties.after(tokens[1:])])

    def __call__(self, logprobs: mx.array) -> mx.array:
        return draw(self._sampler.settings, logprobs, [fold(self._sampler.seed, self._index)])


class Watched:
    """A model that keeps the logits of its last call `[1, tokens, vocabulary]`."""

    logits: mx.array

    def __init__(self, model: Any) -> None:
        self._model = model
        self.layers = model.layers

    def __call__(self, tokens: mx.array, **named: Any) -> mx.array:
        self.logits = self._model(tokens, **named)
        return self.logits
