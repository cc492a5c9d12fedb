"""The process that is killed: it stores sequences and reports those that are durable."""

import logging
import random
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from mlx_swarm.broker.cache.prompt_cache import PromptCache
from mlx_swarm.broker.cache.ssd import SsdStore
from tests.cache.helpers import put
from tests.cache.ssd.folders import CAP, RAM, SECONDS

FAMILIES = ("full", "window", "state", "quantized")


class Sequence(NamedTuple):
    """Something that was put."""

    family: str
    tokens: tuple[int, ...]


def write_for_ever(folder: Path, seed: int, reports: Connection) -> None:
    """What a child does until it is killed."""
    logging.disable(logging.CRITICAL)
    pick = random.Random(seed)
    with SsdStore(folder, CAP) as store:
        cache = PromptCache(RAM, cold=store)
        known: list[Sequence] = []
        while True:
            batch = [_sequence(pick, known) for _ in range(pick.randint(1, 4))]
            for sequence in batch:
                assert put(cache, sequence.tokens, sequence.family, sequence.family).stored
            if cache.flush(SECONDS) == (0, 0):
                reports.send(batch)
                known = [*known, *batch][-20:]


def _sequence(pick: random.Random, known: list[Sequence]) -> Sequence:
    """A new sequence, which often goes on from one known."""
    family = pick.choice(FAMILIES)
    stems = [each.tokens for each in known if each.family == family] or [()]
    stem = pick.choice(stems)
    tail = [pick.randint(0, 50) for _ in range(pick.randint(1, 40))]
    return Sequence(family, (*stem[: pick.randint(0, len(stem))][:80], *tail))
