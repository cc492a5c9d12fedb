"""Workloads for the cache, generated from a seed or read from a trace, as requests of blocks."""

import bisect
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.block_replay import Request

Labels = tuple[Any, ...]


def read_blocks(path: Path) -> list[Request]:
    """The requests of a trace with `timestamp` (ms) and `hash_ids` a line (Mooncake, FAST'25)."""
    with path.open() as lines:
        records = map(json.loads, lines)
        return [Request(each["timestamp"] / 1000, each["hash_ids"]) for each in records]


class Recording:
    """Collects prompts given as labels of blocks; a block's id stands for its whole prefix."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, Any], int] = {}
        self._requests: list[tuple[float, Labels, float | None]] = []

    def add(self, time: float, path: Labels, wait: float | None = None) -> None:
        """A prompt at a time; `wait` as in `Request`."""
        self._requests.append((time, path, wait))

    def requests(self) -> list[Request]:
        """All prompts in the order of time."""
        ordered = sorted(self._requests, key=lambda request: request[0])
        return [Request(time, list(self._blocks(path)), wait) for time, path, wait in ordered]

    def _blocks(self, path: Labels) -> Iterator[int]:
        parent = 0
        for label in path:
            parent = self._ids.setdefault((parent, label), len(self._ids) + 1)
            yield parent


def swarm(seed: int, *, agents: int, turns: int, tool_seconds: float, waves: int) -> list[Request]:
    """Waves of agents that share instructions, each with turns of its own between tool calls.

    Tools take lognormal times; the hint an agent gives is off by up to a third.
    """
    chance, recording = random.Random(seed), Recording()
    for wave, agent in itertools.product(range(waves), range(agents)):
        time = wave * turns * tool_seconds * 0.7 + chance.random() * tool_seconds
        path: Labels = tuple(("instructions", wave % 3, at) for at in range(16))
        path += (("task", wave, agent),)
        for turn in range(turns):
            pause = tool_seconds * chance.lognormvariate(0, 0.5)
            wait = math.inf if turn == turns - 1 else pause * chance.uniform(2 / 3, 4 / 3)
            recording.add(time, path, wait)
            grown = range(chance.randint(1, 4))
            path += tuple(("turn", wave, agent, turn, at) for at in grown)
            time += pause
    return recording.requests()


def round_table(seed: int, *, agents: int, rounds: int) -> list[Request]:
    """Agents that speak in a fixed order, each on its own transcript: the loop that defeats LRU."""
    chance, recording = random.Random(seed), Recording()
    paths: list[Labels] = [tuple(("table", at) for at in range(8)) for _ in range(agents)]
    for turn, agent in itertools.product(range(rounds), range(agents)):
        time = (turn * agents + agent) * 2.0 + chance.random()
        paths[agent] += tuple((agent, turn, at) for at in range(chance.randint(1, 3)))
        recording.add(time, paths[agent], math.inf if turn == rounds - 1 else agents * 2.0)
    return recording.requests()


def tree_search(seed: int, *, searches: int, width: int, depth: int) -> list[Request]:
    """Searches that fork the best of several branches at each step and drop the others."""
    chance, recording = random.Random(seed), Recording()
    for search in range(searches):
        time = search * 5.0
        stem: Labels = (*(("search", at) for at in range(12)), ("problem", search))
        for level in range(depth):
            best, pause = chance.randrange(width), chance.uniform(2, 20)
            branches = [
                (*stem, (search, level, one, 0), (search, level, one, 1)) for one in range(width)
            ]
            for one, branch in enumerate(branches):
                is_last = one != best or level == depth - 1
                recording.add(time + one * 0.1, branch, math.inf if is_last else pause)
            stem, time = branches[best], time + pause
    return recording.requests()


def conversations(seed: int, *, rate: float, think_seconds: float, count: int) -> list[Request]:
    """Conversations that grow, with exponential pauses: recency is what counts."""
    chance, recording, start = random.Random(seed), Recording(), 0.0
    for talk in range(count):
        start += chance.expovariate(rate)
        time = start
        path: Labels = tuple(("system", talk % 2, at) for at in range(2))
        for turn in itertools.count():
            path += tuple((talk, turn, at) for at in range(chance.randint(1, 6)))
            recording.add(time, path)
            if chance.random() < 0.25:
                break
            time += chance.expovariate(1 / think_seconds)
    return recording.requests()


def documents(seed: int, *, count: int, skew: float, moves_every: int, total: int) -> list[Request]:
    """Questions on documents of Zipf popularity, which is dealt anew every so many requests."""
    chance, recording = random.Random(seed), Recording()
    draw, ranks = _zipf(chance, count, skew), list(range(count))
    for at in range(total):
        if at % moves_every == moves_every - 1:
            chance.shuffle(ranks)
        document = ranks[draw()]
        path = tuple((document, part) for part in range(1 + document % 8))
        recording.add(at * 0.3, (*path, ("question", at)))
    return recording.requests()


def phases(seed: int, *, documents: int, uses: int, total: int) -> list[Request]:
    """Working sets that are used evenly, then dropped for the next: frequency misleads."""
    chance, recording = random.Random(seed), Recording()
    for at in range(total):
        phase, document = at // (documents * uses), chance.randrange(documents)
        recording.add(at * 0.3, tuple((phase, document, part) for part in range(8)))
    return recording.requests()


def bursts(seed: int, *, most: int, gap_seconds: float, count: int) -> list[Request]:
    """Prompts repeated a few times soon after each other, then never again."""
    chance, recording = random.Random(seed), Recording()
    for prompt in range(count):
        time, path = float(prompt), tuple((prompt, part) for part in range(6))
        for _ in range(chance.randint(1, most)):
            recording.add(time, path)
            time += chance.expovariate(1 / gap_seconds)
    return recording.requests()


def _zipf(chance: random.Random, count: int, skew: float) -> Callable[[], int]:
    weights = list(itertools.accumulate(1 / (rank + 1) ** skew for rank in range(count)))
    return lambda: bisect.bisect(weights, chance.random() * weights[-1])
