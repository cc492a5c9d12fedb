"""The sessions with which the simulator is held against a real broker: small, and short of RAM."""

from typing import NamedTuple

from bench.simulate_engine import Sizes
from bench.simulate_workload import Session, SwarmSizes, swarm


class Case(NamedTuple):
    """Sessions, and the settings for both engines."""

    name: str
    sizes: Sizes
    sessions: list[Session]


def checks(bytes_per_token: int, vocabulary: int, seed: int = 1, agents: int = 24) -> list[Case]:
    """Agents that come over time, go on in turns, and whose transcripts are about 2.5 times as
    large as RAM: without a tier below, and with one.
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
    ]
