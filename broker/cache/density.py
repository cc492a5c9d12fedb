"""Hit density: what a leaf is worth, from what was seen to happen to leaves like it. No MLX."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate

from .naming import own_page_digests, page_digest
from .node import Node
from .prefix_hash import PAGE_TOKENS

GROUPS = 4
"""Nodes used once, 2-3, 4-7, 8 and more times."""

AGES = 48
"""Age classes: an age of n tokens is in class n.bit_length()."""

MEMORY = 65_536
"""Lifetimes that the default policy remembers."""

_POOLED_LIFETIMES = 100
_REFRESH_USES = 256


class HitDensity:
    """Keeps the leaves with the most expected hits for the space and time that they will take.

    A lifetime runs from one use of a node to the next. For nodes used n times before (in four
    groups), the policy counts how many lifetimes began and at which age they ended in a hit,
    token by token; age is in tokens admitted to the cache since the use, so that idle time costs
    nothing. From the counts,

    density(group, age) = max over later ages t of  hits in (age, t] / lifetimes spent in (age, t]

    Within a group the least recently used leaf goes first, and between groups the one whose
    density is lowest. With one group, or groups that behave alike, this is LRU. What has left
    memory is remembered by its page digest, so that reuse after eviction counts too: otherwise a
    cache that evicts too early would never find out.

    `memory` is the one parameter: how many evicted nodes are remembered, and after how many uses
    the counts are halved, so that the past fades.

    The formula is the Gittins index; its use for caches follows LHD (Beckmann, Chen, Cidon, NSDI
    2018), here with LRU queues instead of sampling, so that a victim costs O(log n).
    """

    def __init__(self, memory: int = MEMORY) -> None:
        self._memory = memory
        self._evicted: OrderedDict[bytes, tuple[int, int, int]] = OrderedDict()
        self._hits = [[0.0] * AGES for _ in range(GROUPS)]
        self._lifetimes = [0.0] * GROUPS
        self._densities = [[0.0] * AGES for _ in range(GROUPS)]
        self._admitted = 0
        self._uses = 0
        self._counted = 0.0

    def used(self, node: Node, admitted: bool) -> None:
        """Count a use: it ends one lifetime in a hit and begins the next."""
        if not node.uses:
            node.uses = self._recall(node)
        else:
            self._hit(node.uses, node.used_at, len(node))
        if admitted:
            self._admitted += len(node)
        node.uses += 1
        node.used_at = self._admitted
        self._lifetimes[_group(node.uses)] += len(node)
        self._uses += 1
        self._counted += 1
        if self._uses % self._memory == 0:
            self._fade()
        if self._uses % _REFRESH_USES == 0:
            self._refresh()

    def group(self, node: Node) -> int:
        """Which of the four groups a node is in."""
        return _group(node.uses)

    def density(self, node: Node) -> float:
        """Expected hits for each token of space and each token admitted meanwhile."""
        return self._densities[_group(node.uses)][_age_class(self._admitted - node.used_at)]

    def leaving(self, node: Node) -> None:
        """Remember a node that is about to leave, if a page of it can tell it from others."""
        if node.stop // PAGE_TOKENS == node.start // PAGE_TOKENS:
            return
        digest = page_digest(node)
        self._evicted.pop(digest, None)
        self._evicted[digest] = (node.uses, node.used_at, len(node))
        if len(self._evicted) > self._memory:
            self._evicted.popitem(last=False)

    def _recall(self, node: Node) -> int:
        """How often a new node's tokens were used before; that they are again is a hit."""
        most = 0
        for digest in own_page_digests(node) if self._evicted else ():
            past = self._evicted.pop(digest, None)
            if past is not None:
                self._hit(*past)
                most = max(most, past[0])
        return most

    def _hit(self, uses: int, used_at: int, tokens: int) -> None:
        self._hits[_group(uses)][_age_class(self._admitted - used_at)] += tokens

    def _fade(self) -> None:
        self._hits = [[count / 2 for count in row] for row in self._hits]
        self._lifetimes = [count / 2 for count in self._lifetimes]
        self._counted /= 2

    def _refresh(self) -> None:
        """Compute the densities anew, each group's counts mixed with a little of all groups'."""
        share = _POOLED_LIFETIMES / self._counted
        pooled = [share * sum(column) for column in zip(*self._hits, strict=True)]
        for group, row in enumerate(self._hits):
            hits = [own + other for own, other in zip(row, pooled, strict=True)]
            lifetimes = self._lifetimes[group] + share * sum(self._lifetimes)
            self._densities[group] = hit_densities(hits, lifetimes)


def hit_densities(hits: Sequence[float], lifetimes: float) -> list[float]:
    """The density at each age class, from the hits in each and the lifetimes that began.

    The best stopping age is found for all classes in one pass from the oldest: a class takes in
    the classes after it for as long as that raises its density.
    """
    ended = accumulate(hits, initial=0.0)
    stretches: list[tuple[float, float]] = []
    densities = [0.0] * len(hits)
    spent = [
        max(lifetimes - before - count / 2, 1e-9) * _width(age)
        for age, (count, before) in enumerate(zip(hits, ended, strict=False))
    ]
    for age in reversed(range(len(hits))):
        gained, cost = hits[age], spent[age]
        while stretches and stretches[-1][0] * cost >= gained * stretches[-1][1]:
            more, further = stretches.pop()
            gained, cost = gained + more, cost + further
        stretches.append((gained, cost))
        densities[age] = gained / cost
    return densities


def _group(uses: int) -> int:
    return min(GROUPS, uses.bit_length()) - 1


def _age_class(age: int) -> int:
    return min(age.bit_length(), AGES - 1)


def _width(age_class: int) -> int:
    """Tokens between the bounds of an age class."""
    return 1 << max(0, age_class - 1)
