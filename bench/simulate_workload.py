"""What is simulated: sessions that arrive, each with turns that follow one another.

A session's tokens are drawn when they are asked for, from its own seed, so that ten thousand of
them take no memory before they begin, and the same ones can be played to a real broker.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mlx_swarm.broker.cache.prefix_hash import Tokens
from mlx_swarm.broker.errors import InvalidSetting
from mlx_swarm.broker.request import Request

VOCABULARY = 128_000
BLOCK_TOKENS = 512
"""Tokens of a block of a trace."""

Range = tuple[int, int]


class Turn(NamedTuple):
    """`ask` new tokens are asked `pause` seconds after the last answer, and `answer` tokens come
    back.
    """

    ask: int
    answer: int
    pause: float = 0.0


class Session(NamedTuple):
    """One agent's turns, from `at` seconds on; its first prompt begins with `opening()`.

    `boundary` is how much of that others are likely to share.
    """

    name: str
    at: float
    opening: Callable[[], Tokens]
    turns: Sequence[Turn]
    seed: tuple[int, ...]
    boundary: int = 0
    tenant: str = ""
    swarm: str = ""
    priority: int = 0
    deadline: float | None = None
    vocabulary: int = VOCABULARY

    def request(self, tokens: Sequence[int], turn: Turn) -> Request:
        """What it asks of a broker."""
        return Request(
            tokens=tokens,
            max_tokens=turn.answer,
            boundaries=(self.boundary,) if self.boundary else (),
            tenant=self.tenant,
            swarm=self.swarm,
            agent=self.name,
            priority=self.priority,
            deadline=self.deadline,
        )

    def draw(self) -> Callable[[int], Tokens]:
        """Its own tokens, the next so many of them at a time."""
        random = np.random.default_rng(self.seed)
        low, high = self.vocabulary // 10, self.vocabulary * 9 // 10
        return lambda count: random.integers(low, high, count, np.uint32)


class SwarmSizes(NamedTuple):
    """Agents with one of `sets` instructions each; from and to how many tokens of each kind.

    `pause` is the mean time that tools take between turns, `rate` is in arrivals a second, 0 for
    all at once. One agent in `urgent` has a higher priority, 0 for none.
    """

    agents: int
    sets: int = 4
    turns: int = 4
    instructions: Range = (500, 2000)
    ask: Range = (20, 200)
    answer: Range = (16, 128)
    pause: float = 5.0
    rate: float = 0.0
    tenants: int = 1
    urgent: int = 0
    deadline: float | None = None
    vocabulary: int = VOCABULARY


def swarm(seed: int, sizes: SwarmSizes) -> Iterator[Session]:
    """Poisson arrivals, lognormal times for tools; every agent keeps its transcript."""
    random = np.random.default_rng(seed)
    low, high = sizes.vocabulary // 10, sizes.vocabulary * 9 // 10
    lengths = random.integers(*sizes.instructions, sizes.sets, endpoint=True)
    instructions = [random.integers(low, high, int(each), np.uint32) for each in lengths]
    at = 0.0
    for number in range(sizes.agents):
        at += float(random.exponential(1 / sizes.rate)) if sizes.rate else 0.0
        mine = instructions[int(random.integers(sizes.sets))]
        yield Session(
            name=f"agent-{number}",
            at=at,
            opening=lambda mine=mine: mine,  # type: ignore[misc]
            turns=[_turn(random, sizes, first=not each) for each in range(sizes.turns)],
            seed=(seed, number),
            boundary=len(mine),
            tenant=f"tenant-{number % sizes.tenants}" if sizes.tenants > 1 else "",
            swarm="swarm",
            priority=int(bool(sizes.urgent) and number % sizes.urgent == 0),
            deadline=sizes.deadline,
            vocabulary=sizes.vocabulary,
        )


def _turn(random: np.random.Generator, sizes: SwarmSizes, first: bool) -> Turn:
    ask, answer = (int(random.integers(*each, endpoint=True)) for each in (sizes.ask, sizes.answer))
    pause = 0.0 if first else sizes.pause * float(random.lognormal(-0.125, 0.5))
    return Turn(ask, answer, pause)


class SessionSizes(NamedTuple):
    """Sessions whose transcripts, all together at their end, take `times` of `ram_tokens`.

    They arrive over the first pause and go on in `turns` turns with pauses of `pause` seconds.
    """

    sessions: int
    ram_tokens: int
    times: float = 3.0
    turns: int = 6
    answer: int = 48
    pause: float = 10.0
    vocabulary: int = VOCABULARY


def sessions(seed: int, sizes: SessionSizes) -> Iterator[Session]:
    """Nobody shares anything with anybody: what RAM cannot hold is computed again, or read."""
    each = int(sizes.ram_tokens * sizes.times / sizes.sessions)
    own = each - sizes.turns * sizes.answer
    if own < 2 * sizes.turns:
        raise InvalidSetting(
            f"{sizes.sessions:,} sessions of {each:,} tokens have no room for {sizes.turns} "
            f"answers of {sizes.answer} tokens"
        )
    random = np.random.default_rng(seed)
    ask = own // (2 * sizes.turns)
    first = own - (sizes.turns - 1) * ask
    for number in range(sizes.sessions):
        pauses = sizes.pause * random.uniform(0.5, 1.5, sizes.turns)
        turns = [Turn(ask, sizes.answer, float(pause)) for pause in pauses[1:]]
        yield Session(
            name=f"session-{number}",
            at=float(random.uniform(0, sizes.pause)),
            opening=lambda: np.empty(0, np.uint32),
            turns=[Turn(first, sizes.answer), *turns],
            seed=(seed, number),
            swarm=f"session-{number}",
            vocabulary=sizes.vocabulary,
        )


def trace(path: Path, count: int | None = None, speed: float = 1.0) -> Iterator[Session]:
    """The first `count` requests of a trace (all), in which time runs `speed` times as fast.

    A line has `timestamp` (ms), `input_length`, `output_length`, and `hash_ids`, the chained ids of
    its blocks of 512 tokens (Mooncake, FAST'25). Equal ids become equal tokens.
    """
    if not 0 < speed < math.inf:
        raise InvalidSetting(f"a speed of {speed}; it is more than 0")
    with path.open() as lines:
        for number, line in enumerate(lines):
            if count is not None and number >= count:
                return
            record = json.loads(line)
            blocks, length = np.array(record["hash_ids"], np.uint32), int(record["input_length"])
            yield Session(
                name=f"request-{number}",
                at=record["timestamp"] / 1e3 / speed,
                opening=lambda blocks=blocks, length=length: _spelled(blocks, length),  # type: ignore[misc]
                turns=[Turn(0, max(1, int(record["output_length"])))],
                seed=(number,),
            )


def _spelled(blocks: Tokens, length: int) -> Tokens:
    """The tokens of blocks: a block has its own ones, none of which another block has."""
    starts = blocks * np.uint32(BLOCK_TOKENS)
    tokens = starts[:, None] + np.arange(BLOCK_TOKENS, dtype=np.uint32)[None]
    return tokens.reshape(-1)[:length]
