"""Which parts of extents the rows of a batch read together: the attention groups of a decode step.

Every row reads a path of pieces of extents, from position 0 on. Where paths share an extent they
are cut so that each part has one set of rows. A step takes a bounded number of parts; what a row
reads behind the first part that was left out belongs into its tail. How many parts a step takes is
the attention's to say (`kernels.launch.MAX_SPANS`); how long one has to be is said here.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

LEAST_SPAN = 16
"""A part shorter than this is read in the tails: prompts often begin alike by chance."""

LEAST_OWN_SPAN = 512
"""The same for a part that only one row reads, which a span saves nothing but the copy."""


class Piece(NamedTuple):
    """Tokens [start, stop), absolute positions, of an extent."""

    extent: Any
    start: int
    stop: int


class SharedSpan(NamedTuple):
    """A piece that these rows of the batch read."""

    piece: Piece
    rows: tuple[int, ...]


class Sharing(NamedTuple):
    """The spans of a step, parents first, and up to which position each row is served by them."""

    spans: list[SharedSpan]
    reach: list[int]


_Key = tuple[int, int, int]


def is_worth_a_span(tokens: int, *, alone: bool) -> bool:
    """Whether a part is to be read where it lies rather than copied into the tail of each reader;
    `alone` where there is one reader, and nobody else even leases it.
    """
    return tokens >= (LEAST_OWN_SPAN if alone else LEAST_SPAN)


def share(paths: Sequence[Sequence[Piece]], limit: int | None) -> Sharing:
    """At most `limit` spans: those that save most copying, each with all that comes before it;
    none for its own sake that is not worth a span. Without a limit every part is one.
    """
    extents = {id(piece.extent): piece.extent for path in paths for piece in path}
    walks = _cut(paths)
    members: dict[_Key, list[int]] = {}
    parents: dict[_Key, _Key | None] = {}
    for row, walk in enumerate(walks):
        for parent, key in zip([None, *walk], walk, strict=False):
            members.setdefault(key, []).append(row)
            parents[key] = parent
    chosen = dict.fromkeys(members) if limit is None else _choose(members, parents, limit)
    reach = [_reach(walk, chosen) for walk in walks]
    spans = []
    for extent, start, stop in chosen:
        # The same tokens may lie in other extents on another row's way to this part.
        rows = tuple(row for row in members[extent, start, stop] if reach[row] >= stop)
        if rows:
            spans.append(SharedSpan(Piece(extents[extent], start, stop), rows))
    return Sharing(spans, reach)


def _cut(paths: Sequence[Sequence[Piece]]) -> list[list[_Key]]:
    """Every row's path, cut where some row's path begins, ends or leaves."""
    cuts: dict[int, set[int]] = {}
    readers: dict[_Key, set[int]] = {}
    for path in paths:
        for piece in path:
            cuts.setdefault(id(piece.extent), set()).update((piece.start, piece.stop))
    walks: list[list[_Key]] = []
    for row, path in enumerate(paths):
        walk: list[_Key] = []
        for extent, start, stop in path:
            bounds = sorted(at for at in cuts[id(extent)] if start <= at <= stop)
            walk += [(id(extent), a, b) for a, b in pairwise(bounds)]
        for key in walk:
            readers.setdefault(key, set()).add(row)
        walks.append(walk)
    return [_joined(walk, readers) for walk in walks]


def _joined(walk: list[_Key], readers: dict[_Key, set[int]]) -> list[_Key]:
    """Neighbours in one extent with the same readers become one."""
    result: list[_Key] = []
    last: set[int] = set()
    for key in walk:
        if result and result[-1][0] == key[0] and result[-1][2] == key[1] and last == readers[key]:
            result[-1] = (key[0], result[-1][1], key[2])
        else:
            result.append(key)
        last = readers[key]
    return result


def _choose(
    members: dict[_Key, list[int]], parents: dict[_Key, _Key | None], limit: int
) -> dict[_Key, None]:
    chosen: dict[_Key, None] = {}
    # A row that is alone here reads what others lease, or what it has no memory to copy.
    worth = [key for key in members if is_worth_a_span(key[2] - key[1], alone=False)]
    for key in sorted(worth, key=lambda key: (key[1] - key[2]) * len(members[key])):
        chain: list[_Key] = []
        above: _Key | None = key
        while above is not None and above not in chosen:
            chain.append(above)
            above = parents[above]
        if len(chosen) + len(chain) <= limit:
            chosen.update(dict.fromkeys(reversed(chain)))
    return chosen


def _reach(walk: list[_Key], chosen: dict[_Key, None]) -> int:
    reach = 0
    for key in walk:
        if key not in chosen:
            break
        reach = key[2]
    return reach
