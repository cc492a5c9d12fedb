"""Two tokenizations of one text: as far as they say the same, and one prompt made of both.

A model may write a text in other tokens than a tokenizer makes of it. Both are cut before special
tokens, at which decoding begins anew whatever came before; so only what differs is decoded. A
prompt goes over from one to the other where both have the end of a token: what follows is what the
tokenizer makes of it.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Decode = Callable[[Ids], str]

TRIES = 16
"""So many tokens before the first difference it is looked for where both have the end of one."""


class Piece(NamedTuple):
    """A stretch of each: tokens [kept, kept_stop) and [rendered, rendered_stop), of one text.

    The first `same` tokens are equal.
    """

    kept: int
    kept_stop: int
    rendered: int
    rendered_stop: int
    same: int


class Alignment(NamedTuple):
    """The beginnings of two tokenizations that say the same, as pieces."""

    pieces: tuple[Piece, ...]

    @property
    def kept(self) -> int:
        """Tokens of the first that belong to the common text."""
        return self.pieces[-1].kept_stop if self.pieces else 0

    @property
    def rendered(self) -> int:
        """Tokens of the second that it takes the place of."""
        return self.pieces[-1].rendered_stop if self.pieces else 0

    def joined(self, kept: Ids, rendered: Ids) -> Ids:
        """The common text in the first's tokens, what follows in the second's."""
        return np.concatenate([kept[: self.kept], rendered[self.rendered :]])

    def moved(self, lengths: Iterable[int]) -> Iterator[int]:
        """Lengths of the second as lengths of what is joined; those that have none are left out."""
        for length in lengths:
            if length >= self.rendered:
                yield length - self.rendered + self.kept
                continue
            piece = next(each for each in self.pieces if length < each.rendered_stop)
            if length - piece.rendered <= piece.same:
                yield length - piece.rendered + piece.kept


def align(kept: Ids, rendered: Ids, decode: Decode, special: Collection[int]) -> Alignment:
    """As far as `kept` says what `rendered` says. `special` are the ids to cut before."""
    pieces = []
    for (start, stop), (other, end) in zip(
        _cuts(kept, special), _cuts(rendered, special), strict=False
    ):
        left, right = kept[start:stop], rendered[other:end]
        same = common_length(left, right)
        is_whole = same == len(left) == len(right) or decode(left) == decode(right)
        n, k = (len(left), len(right)) if is_whole else _within(left, right, same, decode)
        if n:
            pieces.append(Piece(start, start + n, other, other + k, min(same, n)))
        if not is_whole:
            break
    return Alignment(tuple(pieces))


def common_length(left: Ids, right: Ids) -> int:
    """How many tokens both begin with."""
    shorter = min(len(left), len(right))
    differs = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(differs[0]) if len(differs) else shorter


def _cuts(tokens: Ids, special: Collection[int]) -> Iterator[tuple[int, int]]:
    """Stretches that begin with a special token, the first one excepted."""
    places = np.flatnonzero(np.isin(tokens, list(special))).tolist()
    return pairwise([0, *(place for place in places if place), len(tokens)])


def _within(left: Ids, right: Ids, same: int, decode: Decode) -> tuple[int, int]:
    """The latest ends of tokens in both at which the texts so far agree, and can be joined."""
    text, wanted = decode(left), decode(right)
    agreed = _agreed(text, wanted)
    latest = _tokens_within(left, agreed, same, decode)
    for n in range(latest, max(same, latest - TRIES), -1):
        head = decode(left[:n])
        if not wanted.startswith(head):
            continue
        k = _tokens_within(right, len(head), same, decode)
        # Bytes on both sides of a cut could make up a character that is in neither.
        if decode(np.concatenate([left[:n], right[k:]])) == wanted:
            return n, k
    return same, same


def _tokens_within(tokens: Ids, characters: int, at_least: int, decode: Decode) -> int:
    """How many tokens make up no more than so many characters."""
    lengths = range(at_least, len(tokens) + 1)
    found = bisect_right(lengths, characters, key=lambda length: len(decode(tokens[:length])))
    return max(at_least + found - 1, at_least)


def _agreed(left: str, right: str) -> int:
    """How many characters both begin with."""
    lengths = range(1, min(len(left), len(right)) + 1)
    return bisect_right(lengths, False, key=lambda length: left[:length] != right[:length])
