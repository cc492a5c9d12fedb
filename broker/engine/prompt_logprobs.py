"""Log-probabilities of prompts: the model's own, gathered tile by tile while a prompt is computed.

A token's is in the logits of the position before it. Only tiles of rows that ask have their logits
computed; what comes of them stays on the device until somebody wants to know.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..cache.logprobs import Logprobs, unknown
from ..cache.prefix_hash import Tokens
from ..request import TokenLogprob
from .logprobs import step_logprobs

TILE_LOGITS = 256 << 20
"""Bytes that the logits of one call of the model may take in float32, where they are computed.
With what they are reduced to, twice as much is in use; up to five times for alternatives.
"""

ORDERING = 4
"""To find alternatives takes several times as much, so a call is for so many times fewer tokens."""


class PromptLogprobs:
    """What is known of one prompt by now, with so many `alternatives` for each token.

    `tile` is how many tokens one call of the model may compute.
    """

    def __init__(self, prompt: Tokens, alternatives: int, vocabulary: int) -> None:
        self.alternatives = alternatives
        bytes_a_token = 4 * vocabulary * (ORDERING if alternatives else 1)
        # A power of two: fewer shapes are seen.
        self.tile = 1 << (max(TILE_LOGITS // bytes_a_token, 1).bit_length() - 1)
        self._prompt = prompt
        self._own = unknown(len(prompt))
        self._own[0] = 0.0
        count = min(alternatives, vocabulary)
        self._top: tuple[npt.NDArray[np.uint32], Logprobs] = (
            np.zeros((len(prompt), count), np.uint32),
            np.zeros((len(prompt), count), np.float32),
        )
        self._computed: list[tuple[_Tile, int, int, int]] = []

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to compute."""
        return not np.isnan(self._read()).any()

    def know(self, logprobs: Logprobs) -> None:
        """Those of the first tokens were known before."""
        self._own[: len(logprobs)] = logprobs

    def own(self, tokens: int) -> Logprobs:
        """Those of the first tokens of the prompt and what follows it. Waits for the device."""
        own = unknown(tokens)
        known = self._read()[:tokens]
        own[: len(known)] = known
        return own

    def items(self) -> tuple[TokenLogprob | None, ...]:
        """One for each token, None for the first and for what was not computed. Waits for the
        device.
        """
        known = ~np.isnan(self._read())
        known[0] = False
        ids, logprobs = (array.tolist() for array in self._top)
        columns: Any = zip(
            known.tolist(), self._prompt.tolist(), self._own.tolist(), ids, logprobs, strict=True
        )
        return tuple(
            TokenLogprob(token, own, tuple(zip(ids, logprobs, strict=True))) if is_known else None
            for is_known, token, own, ids, logprobs in columns
        )

    def _following(self, position: int, count: int) -> Tokens:
        """The tokens whose log-probabilities so many positions tell."""
        return self._prompt[position + 1 : position + count + 1]

    def _read(self) -> Logprobs:
        """Take over what was computed; waits for it."""
        computed, self._computed = self._computed, []
        for tile, first, position, count in computed:
            own, *top = (column[first : first + count] for column in tile.read())
            places = slice(position + 1, position + count + 1)
            self._own[places] = own
            if self.alternatives:
                self._take_top(places, *top)
        return self._own

    def _take_top(self, places: slice, ids: npt.NDArray[np.uint32], logprobs: Logprobs) -> None:
        wanted = self._top[0].shape[1]
        order = np.lexsort((ids, -logprobs))[:, :wanted]
        self._top[0][places] = np.take_along_axis(ids, order, axis=1)
        self._top[1][places] = np.take_along_axis(logprobs, order, axis=1)


class _Tile:
    """What one call of the model told, read once for all rows in it."""

    def __init__(self, arrays: Sequence[mx.array]) -> None:
        self._arrays = arrays
        self._columns: list[Any] | None = None

    def read(self) -> list[Any]:
        if self._columns is None:
            self._columns = [np.array(array) for array in self._arrays]
            self._arrays = ()
        return self._columns


def gather(logits: mx.array, parts: Sequence[tuple[PromptLogprobs, int, int]]) -> list[mx.array]:
    """Let prompts, each with a position and so many tokens from there, have what the logits
    `[tokens, vocabulary]` of all of them tell; returns what is to be evaluated with the KV.
    """
    following = np.concatenate([each._following(at, count) for each, at, count in parts])
    counts = [each.alternatives for each, _, count in parts for _ in range(count)]
    arrays = step_logprobs(logits, mx.array(following), counts).arrays
    tile, first = _Tile(arrays), 0
    for each, position, count in parts:
        each._computed.append((tile, first, position, count))
        first += count
    return arrays
