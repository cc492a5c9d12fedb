"""Why a hit ends where it does: every miss and every short hit has a reason."""

from collections import OrderedDict
from itertools import islice

import xxhash

from ..trace.events import Divergence, MissReason
from .prefix_hash import PAGE_TOKENS, Tokens
from .space import Match, Space

REMEMBERED = 16_384
"""Evicted nodes that are remembered, 8 bytes each and the dictionary around them."""

COMPARED_NAMESPACES = 64
"""So many of the latest namespaces are asked whether they have what this one lacks."""


class Forgotten:
    """The beginnings of what was evicted, as hashes: a constant number, the oldest go."""

    def __init__(self) -> None:
        self._starts: OrderedDict[int, None] = OrderedDict()

    def add(self, namespace: str, tokens: Tokens, start: int) -> None:
        """A node that began at `start` was evicted; `tokens` reach beyond it."""
        self._starts[_key(namespace, tokens, start)] = None
        if len(self._starts) > REMEMBERED:
            self._starts.popitem(last=False)

    def knows(self, namespace: str, tokens: Tokens, at: int) -> bool:
        """Whether a node that would go on with token `at` of a prompt was evicted."""
        return _key(namespace, tokens, at) in self._starts


def explain(
    tokens: Tokens, match: Match, space: Space, spaces: dict[str, Space], forgotten: Forgotten
) -> tuple[MissReason | None, Divergence | None]:
    """Why `match` ends short of the last token but one, and the two tokens if they differ."""
    limit = len(tokens) - 1
    matched = match.walk.length
    if match.length >= limit:
        return ("below_minimum" if limit <= 0 else None), None
    if match.reason is not None:
        return match.reason, match.walk.divergence
    if forgotten.knows(space.name, tokens, matched):
        return "evicted", match.walk.divergence
    if matched < PAGE_TOKENS and _elsewhere(tokens, matched, space, spaces):
        return "namespace", match.walk.divergence
    if match.walk.divergence is not None:
        return "diverged", match.walk.divergence
    return "cold_start", None


def _elsewhere(tokens: Tokens, matched: int, space: Space, spaces: dict[str, Space]) -> bool:
    """Whether another namespace goes further along the prompt than this one."""
    latest = islice(reversed(spaces), COMPARED_NAMESPACES)
    others = (spaces[name].tree for name in latest if name != space.name)
    return any(tree.walk(tokens).length > matched for tree in others)


def _key(namespace: str, tokens: Tokens, at: int) -> int:
    seed = xxhash.xxh3_64_intdigest(namespace.encode())
    return xxhash.xxh3_64_intdigest(tokens[: at + 1].tobytes(), seed)
