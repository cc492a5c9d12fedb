"""Requests replayed block by block through the real tree and queue, and what a clairvoyant reaches.

A block is a page of the tree, whatever number of tokens it stands for in the trace. A request hits
the leading blocks that are still there, and stores the others.
"""

import itertools
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from mlx_swarm.broker.cache.eviction import EvictionPolicy, EvictionQueue
from mlx_swarm.broker.cache.prefix_hash import PAGE_TOKENS
from mlx_swarm.broker.cache.tree import PrefixTree, Walk


class Request(NamedTuple):
    """A prompt at a time in seconds, as the ids of its blocks; equal ids mean an equal prefix.

    `wait` is in how many seconds its sequence is needed again (inf: never), None if nobody knows.
    """

    time: float
    blocks: Sequence[int]
    wait: float | None = None


class Replay:
    """A cache of `capacity` blocks without KV. Hints are given if `hinted`."""

    def __init__(self, capacity: int, policy: EvictionPolicy, hinted: bool = False) -> None:
        self._capacity = capacity
        self._hinted = hinted
        self._now = 0.0
        self.queue = EvictionQueue(policy, lambda: self._now)
        self.tree = PrefixTree(clock=lambda: self._now, observer=self.queue)

    def hit_rate(self, requests: Iterable[Request]) -> float:
        """The fraction of all blocks that were there."""
        hits = total = 0
        for request in requests:
            hits += self._serve(request)
            total += len(request.blocks)
        return hits / max(1, total)

    def _serve(self, request: Request) -> int:
        self._now = request.time
        tokens = np.repeat(np.asarray(request.blocks, np.uint32), PAGE_TOKENS)
        walk = self.tree.walk(tokens)
        hits = walk.length // PAGE_TOKENS
        node = self.tree.root
        if walk.path:
            node = walk.path[-1]
            self.tree.touch(node)
        for stop in range(walk.length + PAGE_TOKENS, len(tokens) + 1, PAGE_TOKENS):
            block = Block(stop - PAGE_TOKENS, stop)
            node = self.tree.insert(tokens[:stop], block, walk=walk).node
            walk = Walk([node], stop, None)
        if self._hinted and request.wait is not None:
            self.tree.expect(node, request.wait)
        excess = len(self.tree) - self._capacity
        for victim in itertools.islice(self.queue.victims(), max(0, excess)):
            self.tree.remove(victim)
        return hits


def clairvoyant_hit_rate(requests: Sequence[Request], capacity: int) -> float:
    """What a cache reaches that knows every next use and may refuse a block: the upper bound."""
    nexts = _next_uses(requests)
    present: dict[int, int] = {}
    order: list[tuple[int, int]] = []
    hits = 0
    for request, following in zip(requests, nexts, strict=True):
        for block, use in zip(request.blocks, following, strict=True):
            hits += block in present
            present[block] = use
            heappush(order, (-use, block))
        while len(present) > capacity:
            latest, block = heappop(order)
            if present.get(block) == -latest:
                del present[block]
    return hits / max(1, sum(len(request.blocks) for request in requests))


def working_set(requests: Sequence[Request]) -> int:
    """Distinct blocks of a trace."""
    return len({block for request in requests for block in request.blocks})


class Block(NamedTuple):
    """Tokens [start, stop) without KV, as a node holds them."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def split(self, at: int) -> tuple["Block", "Block"]:
        return Block(self.start, at), Block(at, self.stop)


def _next_uses(requests: Sequence[Request]) -> list[list[int]]:
    upcoming: dict[int, int] = {}
    result = []
    for index in range(len(requests) - 1, -1, -1):
        blocks = requests[index].blocks
        result.append([upcoming.get(block, 1 << 60) for block in blocks])
        upcoming.update(dict.fromkeys(blocks, index))
    return result[::-1]
