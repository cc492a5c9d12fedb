"""The sessions with which the simulator is held against a real broker: small, and short of RAM."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from bench.load_presets import CPU
from bench.load_sessions import SessionSizes
from bench.simulate_engine import Sizes
from bench.simulate_workload import Session, SwarmSizes, Turn, swarm


class Case(NamedTuple):
    """Sessions, and the settings for both engines."""

    name: str
    sizes: Sizes
    sessions: list[Session]


def checks(bytes_per_token: int, vocabulary: int, seed: int = 1, agents: int = 24) -> list[Case]:
    """Agents that come over time, go on in turns, and whose transcripts are about 2.5 times as
    large as RAM: without a tier below, and with one. And the sessions of `bench.load` on a CPU,
    whose working sets do not fit.
    """
    sizes = SwarmSizes(
        agents,
        sets=3,
        turns=4,
        instructions=(200, 500),
        ask=(40, 160),
        answer=(8, 24),
        pause=1.5,
        rate=agents / 4,
        vocabulary=vocabulary,
    )
    everything = sum(
        sum(turn.ask + turn.answer for turn in session.turns) for session in swarm(seed, sizes)
    )
    ram = int(everything * bytes_per_token / 2.5)
    small = Sizes(ram=ram, max_rows=8)
    return [
        Case("short of RAM", small, list(swarm(seed, sizes))),
        Case(
            "short of RAM, with a cold tier", small._replace(cold=64 * ram), [*swarm(seed, sizes)]
        ),
        _beyond(bytes_per_token, vocabulary, seed, CPU.sessions._replace(sessions=agents)),
    ]


def _beyond(bytes_per_token: int, vocabulary: int, seed: int, sizes: SessionSizes) -> Case:
    own = sizes.sessions * sizes.turns * (sizes.own + sizes.reply)
    ram = int(bytes_per_token * (sizes.shared + own) / sizes.over)
    return Case(
        f"sessions {sizes.over:g} x RAM, as `bench.load sessions` has them",
        Sizes(ram=ram, max_rows=sizes.rows),
        list(_conversations(seed, sizes, vocabulary)),
    )


def _conversations(seed: int, sizes: SessionSizes, vocabulary: int) -> Iterator[Session]:
    """The same shape as in `bench.load`: all come at once, with a beginning in common."""
    random = np.random.default_rng(seed)
    shared = random.integers(vocabulary // 10, vocabulary * 9 // 10, sizes.shared, np.uint32)
    for number in range(sizes.sessions):
        pauses = [0.0, *random.exponential(sizes.think, sizes.turns - 1).tolist()]
        yield Session(
            name=f"agent-{number}",
            at=0.0,
            opening=lambda: shared,
            turns=[Turn(sizes.own, sizes.reply, pause) for pause in pauses],
            seed=(seed, number),
            vocabulary=vocabulary,
        )
