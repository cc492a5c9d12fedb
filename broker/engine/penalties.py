"""Logit bias, penalties and `min_tokens`: what is done to logits before a token is drawn.

The results are mlx-lm's to the last bit, for rows of equal settings in one call. The tokens that
penalties look at are kept on the device, where a token that is still being computed can join them:
no step waits for the tokens of the one before.
"""

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ..cache.prefix_hash import Tokens
from ..sampling import PENALTIES, Sampling

SMALLEST_CONTEXT = 64
"""Contexts of all tokens have room for this times a power of two, so that few shapes are seen."""


class Penalty(NamedTuple):
    """One of mlx-lm's penalties and how many of the last tokens it looks at; 0 of them is off."""

    value: float
    context: int


class Rules(NamedTuple):
    """What is done to the logits of a row, the same for many rows.

    `banned` are the tokens that must not be chosen.
    """

    bias: tuple[tuple[int, float], ...]
    repetition: Penalty
    presence: Penalty
    frequency: Penalty
    banned: tuple[int, ...] = ()

    @property
    def context(self) -> int:
        """How many of the last tokens matter."""
        return max(self.repetition.context, self.presence.context, self.frequency.context)


class Penalties:
    """The rules of one row, and the tokens that they look at.

    `ends` are not chosen before `min_tokens` tokens of output. `length` counts prompt and output.
    """

    def __init__(
        self, rules: Rules, prompt: Tokens, *, min_tokens: int = 0, ends: Sequence[int] = ()
    ) -> None:
        self._rules = rules
        self._restrained = rules._replace(banned=tuple(ends))
        self._free_from = len(prompt) + min_tokens
        self.rewind(prompt)

    def rewind(self, tokens: Tokens) -> None:
        """Look at these tokens, prompt and output, whatever was noted before."""
        self.length = len(tokens)
        self._recent = _Place(_window(tokens, self._rules.context), 0)

    @property
    def rules(self) -> Rules:
        """What holds for the next token; rows for which it is equal can be computed together."""
        return self._rules if self.length >= self._free_from else self._restrained

    def after(self, output: mx.array) -> "Penalties":
        """The same, once these further tokens `[tokens]` were chosen; this one stays as it is."""
        later = copy(self)
        later.length += output.size
        context = self._rules.context
        if context:
            place = self._recent
            tokens = [place.tokens[place.row], output.astype(place.tokens.dtype)]
            later._recent = _Place(mx.concatenate(tokens)[-context:][None], 0)
        return later


class _Place(NamedTuple):
    """A row's last tokens: row `row` of `tokens` [rows, context], the newest last."""

    tokens: mx.array
    row: int


def penalties_of(
    sampling: Sampling, prompt: Tokens, *, max_tokens: int, ends: Sequence[int]
) -> Penalties | None:
    """The penalties of a row with at most `max_tokens` of output; None if nothing is to be done."""
    room = SMALLEST_CONTEXT
    while room < len(prompt) + max_tokens:
        room *= 2
    repetition, presence, frequency = (_penalty(sampling, name, room) for name in PENALTIES)
    bias = tuple(sorted(sampling.logit_bias.items()))
    rules = Rules(bias, repetition, presence, frequency)
    if not (rules.bias or rules.context or (sampling.min_tokens and ends)):
        return None
    return Penalties(rules, prompt, min_tokens=sampling.min_tokens, ends=ends)


def penalise(logits: mx.array, rows: Sequence[Penalties]) -> mx.array:
    """The logits [rows, vocabulary] of rows with equal rules, after bias and penalties."""
    rules = rows[0].rules
    if rules.bias:
        ids, values = zip(*rules.bias, strict=True)
        logits = logits.at[:, mx.array(ids)].add(mx.array(values, mx.float32))
    if rules.context:
        recent = _together(rows)
        if rules.repetition.context:
            logits = _repetition(logits, recent, rules.repetition)
        if rules.presence.context:
            logits = _presence(logits, recent, rules.presence)
        if rules.frequency.context:
            logits = _frequency(logits, recent, rules.frequency, rows)
    if rules.banned:
        columns = mx.broadcast_to(mx.array(rules.banned)[None], (len(rows), len(rules.banned)))
        logits = mx.put_along_axis(logits, columns, mx.array(-mx.inf, logits.dtype), axis=1)
    return logits


def note(tokens: mx.array, rows: Sequence[Penalties]) -> None:
    """Let rows with equal rules see the tokens [rows] that were chosen for them."""
    if rows[0].rules.context:
        recent = _together(rows)
        newest = tokens[:, None].astype(recent.dtype)
        recent = mx.concatenate([recent[:, 1:], newest], axis=1)
        for row, each in enumerate(rows):
            each._recent = _Place(recent, row)
    for each in rows:
        each.length += 1


def _penalty(sampling: Sampling, name: str, room: int) -> Penalty:
    value = getattr(sampling, f"{name}_penalty")
    off = value == 0 or (name == "repetition" and value == 1)
    size = getattr(sampling, f"{name}_context_size") or room
    return Penalty(0.0, 0) if off else Penalty(float(value), min(size, room))


def _window(prompt: Tokens, size: int) -> mx.array:
    """The prompt's last tokens [1, size]; what is missing is filled with the first of them, which
    changes nothing for what asks whether a token occurs.
    """
    if not size:
        return mx.zeros((1, 0), mx.uint32)
    last = np.asarray(prompt, np.uint32)[-size:]
    return mx.array(np.pad(last, (size - len(last), 0), "edge"))[None]


def _together(rows: Sequence[Penalties]) -> mx.array:
    """The last tokens [rows, context] of rows; moved only where a row has joined or left."""
    places = [each._recent for each in rows]
    tokens = places[0].tokens
    in_order = all(place.tokens is tokens and place.row == at for at, place in enumerate(places))
    if not in_order or len(tokens) != len(rows):
        tokens = mx.stack([place.tokens[place.row] for place in places])
        for row, each in enumerate(rows):
            each._recent = _Place(tokens, row)
    return tokens


def _repetition(logits: mx.array, recent: mx.array, penalty: Penalty) -> mx.array:
    recent = recent[:, -penalty.context :]
    chosen = mx.take_along_axis(logits, recent, axis=1)
    changed = mx.where(chosen < 0, chosen * penalty.value, chosen / penalty.value)
    return mx.put_along_axis(logits, recent, changed, axis=1)


def _presence(logits: mx.array, recent: mx.array, penalty: Penalty) -> mx.array:
    recent = recent[:, -penalty.context :]
    chosen = mx.take_along_axis(logits, recent, axis=1) - penalty.value
    return mx.put_along_axis(logits, recent, chosen, axis=1)


def _frequency(
    logits: mx.array, recent: mx.array, penalty: Penalty, rows: Sequence[Penalties]
) -> mx.array:
    """One subtraction an occurrence, rounded as mlx-lm's are; none for what fills the context."""
    recent = recent[:, -penalty.context :]
    missing = mx.array([max(0, penalty.context - each.length) for each in rows])[:, None]
    counted = mx.arange(penalty.context)[None] >= missing
    amounts = mx.where(counted, penalty.value, 0.0).astype(logits.dtype)
    return logits.at[mx.arange(len(rows))[:, None], recent].subtract(amounts)
