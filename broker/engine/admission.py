"""From what was asked to a row: rendering, and every check that needs the model."""

from collections.abc import Mapping

import numpy as np

from ..cache.prefix_hash import Tokens, as_tokens
from ..errors import ContextOverflow, InvalidRequest
from ..models import LoadedModel, namespace_digest
from ..request import Request
from ..sampling import Sampling
from .drafts import NO_DRAFTS, require_draft
from .grammar import Grammars
from .lane import Lane
from .prompt_logprobs import PromptLogprobs
from .row import Row
from .sampling import SeedSource, SpecialTokens, sampler_for
from .submission import Submission
from .text import TextStream
from .vocabulary import vocabulary_of as vocabulary_of


class Admission:
    """Makes rows of requests, or refuses them with the numbers. Changes nothing.

    `drafts` are the models that may propose tokens, by the names that requests use.
    """

    def __init__(self, model: LoadedModel, drafts: Mapping[str, LoadedModel] = NO_DRAFTS) -> None:
        self._model = model
        self._drafts = drafts
        self._vocabulary = vocabulary_of(model)
        self._special = special_tokens_of(model)
        self._grammars = Grammars(model, self._vocabulary, self._special.ends)
        self._seeds = SeedSource()
        self._ends = frozenset(model.tokenizer.eos_token_ids)

    def row_for(self, submission: Submission, lane: Lane) -> Row:
        """The row of a request, to run in a lane. Raises `InvalidRequest` or `ContextOverflow`."""
        request = submission.request
        prompt, boundaries = self._prompt(request)
        self._check(prompt)
        self._check_bias(request.sampling)
        max_tokens = min(request.max_tokens, self._model.context_length - len(prompt))
        asked = None
        if request.prompt_logprobs:
            asked = PromptLogprobs(prompt, request.top_logprobs, self._vocabulary)
        if request.draft:
            require_draft(self._model, request.draft, self._drafts, len(prompt), max_tokens)
        special, grammar = self._special, None
        if request.grammar is not None:
            grammar = self._grammars.start(request.grammar, request.sampling.min_tokens)
            # It knows itself when an end is too early.
            special = special._replace(ends=())
        return Row(
            submission.id,
            request,
            submission.mailbox,
            prompt=prompt,
            boundaries=(*boundaries, *request.boundaries),
            namespace=namespace_digest(self._model.identity, tenant=request.tenant),
            max_tokens=max_tokens,
            sampler=sampler_for(
                request.sampling,
                self._seeds,
                prompt=prompt,
                max_tokens=max_tokens,
                special=special,
            ),
            text=TextStream(
                self._model.new_detokenizer(), request.stop, request.sampling.min_tokens
            ),
            submitted=submission.submitted,
            lane=lane,
            ends=self._ends,
            grammar=grammar,
            prompt_logprobs=asked,
        )

    def _prompt(self, request: Request) -> tuple[Tokens, tuple[int, ...]]:
        if request.messages:
            rendered = self._model.render(request.messages)
            return as_tokens(rendered.tokens), rendered.boundaries
        tokens = self._model.encode(request.text) if request.text else request.tokens
        # A copy, because an array of the caller's may change while its KV is computed and kept.
        return np.array(as_tokens(tokens)), ()

    def _check(self, prompt: Tokens) -> None:
        context = self._model.context_length
        if not len(prompt):
            raise InvalidRequest("the prompt has no tokens")
        if len(prompt) >= context:
            raise ContextOverflow(
                f"the prompt has {len(prompt):,} tokens; the context of {self._model.name} is "
                f"{context:,}, which has to hold at least one more",
                "tokens",
            )
        highest = int(np.max(prompt))
        if highest >= self._vocabulary:
            raise InvalidRequest(
                f"token {highest} is outside the vocabulary of {self._model.name}, "
                f"0 to {self._vocabulary - 1}",
                "tokens",
            )

    def _check_bias(self, sampling: Sampling) -> None:
        highest = max(sampling.logit_bias, default=0)
        if highest >= self._vocabulary:
            raise InvalidRequest(
                f"logit_bias has the token {highest}; the vocabulary of {self._model.name} is "
                f"0 to {self._vocabulary - 1}",
                "logit_bias",
            )


def special_tokens_of(model: LoadedModel) -> SpecialTokens:
    """The tokens that end the model's output; xtc keeps them and, as in mlx-lm, line breaks."""
    ends = tuple(sorted(e for e in model.tokenizer.eos_token_ids if e < vocabulary_of(model)))
    breaks = model.tokenizer.encode("\n", add_special_tokens=False)
    return SpecialTokens(ends, tuple(sorted({*ends, *breaks})))
