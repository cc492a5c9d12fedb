"""Output that keeps to a grammar: llguidance says which tokens may come next.

The mask of a row's next token needs the token before it. A step is therefore dispatched without the
choices of the rows that have a grammar; those are made in a second dispatch, once the tokens of the
step before are read, while the device computes.
"""

from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer, grammar_from
from llguidance.numpy import (
    allocate_token_bitmask,
    fill_next_token_bitmask,
    fill_next_token_bitmask_par,
)

from ..errors import EngineFailed, InvalidRequest
from ..grammar import Grammar, Source
from ..models import LoadedModel
from .sampling import put_tokens, sample

KEPT_GRAMMARS = 64
LONGEST_REASON = 200
WORD = 32
"""Tokens of one word of a mask."""


class Grammars:
    """The grammars of one model, compiled once each; the last `KEPT_GRAMMARS` are kept."""

    def __init__(self, model: LoadedModel, vocabulary: int, ends: Sequence[int]) -> None:
        self._model = model
        self._vocabulary = max(vocabulary, len(model.tokenizer))
        self._ends = ends
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Source, LLMatcher] = OrderedDict()

    def start(self, grammar: Grammar, min_tokens: int = 0) -> "GrammarState":
        """The state of a row before its first token. Raises `InvalidRequest` for a bad grammar."""
        source = grammar.source()
        if source not in self._compiled:
            self._compiled[source] = self._compile(source)
            if len(self._compiled) > KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(source)
        return GrammarState(
            self._compiled[source].deep_copy(), self._vocabulary, self._ends, min_tokens
        )

    def _compile(self, source: Source) -> LLMatcher:
        if self._tokenizer is None:
            self._tokenizer = self._read_tokenizer()
        try:
            matcher = LLMatcher(self._tokenizer, grammar_from(*source), log_level=0)
        except ValueError as error:
            raise _refusal(source, str(error)) from error
        if not matcher.is_error():
            # Only now is it seen that nothing at all can come out.
            matcher.compute_bitmask()
        if matcher.is_error():
            raise _refusal(source, matcher.get_error())
        return matcher

    def _read_tokenizer(self) -> LLTokenizer:
        try:
            return LLTokenizer(
                self._model.tokenizer_json(),
                n_vocab=self._vocabulary,
                eos_token=list(self._ends) or None,
            )
        except (AttributeError, ValueError) as error:
            raise InvalidRequest(
                f"the tokenizer of {self._model.name} cannot serve a grammar: {error}"
            ) from error


class GrammarState:
    """How far the output of one row has come in its grammar.

    What goes wrong is kept in `error`: it belongs to this row alone.
    """

    def __init__(
        self, matcher: LLMatcher, vocabulary: int, ends: Sequence[int], min_tokens: int = 0
    ) -> None:
        self.matcher = matcher
        self.error: EngineFailed | None = None
        self._ends = _words(ends, vocabulary)
        self._before_end = min_tokens
        self._begun = False

    @property
    def finished(self) -> bool:
        """Whether the output is complete and nothing can follow."""
        return self.error is None and self.matcher.is_stopped()

    def read(self, token: int) -> None:
        """Take in the next token of the output."""
        self._before_end -= 1
        if not self.matcher.is_stopped():
            self.matcher.consume_token(token)
        self.check()

    def rejoin(self) -> None:
        """The row left its batch, all whose tokens were read here, and will join one again."""
        self._begun = False

    def check(self) -> None:
        """Note what has gone wrong."""
        if self.error is None and self.matcher.is_error():
            reason = _one_line(self.matcher.get_error())
            self.error = EngineFailed(f"the grammar could not be followed: {reason}")

    def restrain(self, mask: Any) -> None:
        """Take the ends out of a mask, if it is too early for them and that leaves something."""
        if self._before_end > 0:
            kept = mask & ~self._ends
            if kept.any():
                mask[:] = kept

    def process(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """A logits processor of mlx-lm: logits `[1, vocabulary]`; waits for the last token."""
        if self._begun:
            last: Any = tokens[-1].item()
            self.read(last)
        self._begun = True
        return masked(logits, [self])


def choose_by_grammar(logits: mx.array, tokens: mx.array, seats: Sequence[Any]) -> mx.array:
    """The tokens of a step, with those of the seats that have a grammar chosen from its logits."""
    rows = [row for row, seat in enumerate(seats) if seat.grammar is not None]
    chosen = logits if len(rows) == len(seats) else logits[mx.array(rows)]
    allowed = masked(chosen, [seats[row].grammar for row in rows])
    return put_tokens(tokens, rows, sample(allowed, [seats[row].sampler for row in rows]))


def masked(logits: mx.array, states: Sequence[GrammarState]) -> mx.array:
    """Logits [rows, vocabulary] without what the grammar of each row forbids."""
    halves = mx.array(_masks(states).view(np.uint16))
    allowed = mx.take(_bits(), halves, axis=0).reshape(len(states), -1)[:, : logits.shape[-1]]
    missing = logits.shape[-1] - allowed.shape[-1]
    if missing > 0:
        allowed = mx.pad(allowed, [(0, 0), (0, missing)])
    return mx.where(allowed, logits, mx.array(-mx.inf, logits.dtype))


def _masks(states: Sequence[GrammarState]) -> Any:
    """A bit for each token that may come next [rows, words]; all of them for a row at its end."""
    masks = allocate_token_bitmask(len(states), WORD * len(states[0]._ends))
    asking = [
        (each.matcher, row) for row, each in enumerate(states) if not each.matcher.is_stopped()
    ]
    if len(asking) > 1:
        fill_next_token_bitmask_par(_executor(), asking, masks)
    elif asking:
        fill_next_token_bitmask(asking[0][0], masks, asking[0][1])
    for _, row in asking:
        states[row].check()
        states[row].restrain(masks[row])
    return masks


def _words(tokens: Sequence[int], vocabulary: int) -> Any:
    """A mask with the bits of some tokens."""
    mask = np.zeros(-(-vocabulary // WORD), np.uint32)
    for token in tokens:
        mask[token // WORD] |= np.uint32(1 << token % WORD)
    return mask.view(np.int32)


def _refusal(source: Source, reason: str) -> InvalidRequest:
    return InvalidRequest(f"the {source.form} is not a grammar: {_one_line(reason)}", source.form)


def _one_line(reason: str) -> str:
    """What llguidance says is wrong, without the state of its parser."""
    reason = " ".join(reason.partition("<state>")[0].split())
    return reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]}…"


@cache
def _bits() -> mx.array:
    """The bits of each half of a word, lowest first [65,536, 16]: to look them up is quicker than
    to compute them, and needs nothing compiled.
    """
    numbers = np.arange(1 << 16)[:, None] >> np.arange(16)
    bits = mx.array((numbers & 1).astype(np.bool_))
    mx.eval(bits)
    return bits


@cache
def _executor() -> LLExecutor:
    """The threads that compute masks of many rows."""
    return LLExecutor()
