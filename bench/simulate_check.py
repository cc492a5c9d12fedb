"""The simulator against a real broker: the same sessions, and how far apart they come out."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import numpy as np
from anyio.from_thread import start_blocking_portal
from msgspec import Struct

from bench.simulate_costs import Costs
from bench.simulate_engine import Sizes
from bench.simulate_run import play
from bench.simulate_workload import Session
from bench.swarm_clients import LoadedBroker
from bench.swarm_findings import Bar
from bench.swarm_setup import Setup
from mlx_swarm.broker.broker import Broker
from mlx_swarm.broker.request import Completed, Usage

ERROR_BAR = 0.1


class Totals(Struct, frozen=True, kw_only=True):
    """Prompt tokens by where they came from, tokens computed once more after a preemption, sessions
    that lost their place, and the median and the 99th percentile of the seconds to a first token.
    """

    ram: int
    cold: int
    prefilled: int
    recomputed: int
    displaced: int
    ttft_p50: float
    ttft_p99: float
    seconds: float

    @property
    def prompt(self) -> int:
        """All prompt tokens."""
        return self.ram + self.cold + self.prefilled


class Checked(Struct, frozen=True, kw_only=True, tag=True):
    """A workload on a real broker and in the simulator."""

    workload: str
    real: Totals
    simulated: Totals

    @property
    def error(self) -> float:
        """Of the tokens computed, relative to the real ones."""
        return abs(self.simulated.prefilled / self.real.prefilled - 1)

    def bars(self) -> Iterator[Bar]:
        """What the error may be."""
        yield Bar(f"{self.workload}, error of the tokens computed", self.error, ERROR_BAR)


def check(
    name: str, setup: Setup, costs: Costs, sizes: Sizes, sessions: Sequence[Session]
) -> Checked:
    """Play sessions to a broker over the model, and to the simulator."""
    outcome, began = play(sessions, costs, sizes), time.perf_counter()
    answered, displaced = play_real(setup, sizes, sessions)
    seconds = time.perf_counter() - began
    waits = [turn.first - turn.asked for turn in outcome.turns if turn.first is not None]
    return Checked(
        workload=name,
        real=_totals(
            sum((each.usage for each in answered), start=Usage()),
            displaced,
            [each.ttft_seconds for each in answered],
            seconds,
        ),
        simulated=_totals(
            outcome.engine.usage,
            outcome.engine.sessions.statistics().replaced,
            waits,
            outcome.seconds,
        ),
    )


def play_real(
    setup: Setup, sizes: Sizes, sessions: Sequence[Session]
) -> tuple[list[Completed], int]:
    """Every turn of all sessions, each in its time, on a broker with these settings; and how many
    sessions were displaced.
    """
    with TemporaryDirectory() as folder:
        broker = LoadedBroker(
            setup.loaded.name,
            ram=sizes.ram,
            memory=sizes.memory or None,
            max_rows=sizes.max_rows,
            max_queue=sizes.max_queue,
            prefill_chunk=sizes.chunk,
            cold=Path(folder) if sizes.cold else None,
            cold_limit=sizes.cold or "1GiB",
        )
        broker.given = setup.loaded
        with start_blocking_portal() as portal, portal.wrap_async_context_manager(broker):
            return portal.call(_play, broker, sessions)


async def _play(broker: Broker, sessions: Sequence[Session]) -> tuple[list[Completed], int]:
    answered: list[Completed] = []
    began = time.perf_counter()

    async def agent(session: Session) -> None:
        await anyio.sleep(max(0.0, began + session.at - time.perf_counter()))
        draw, transcript = session.draw(), session.opening()
        for number, turn in enumerate(session.turns):
            await anyio.sleep(turn.pause if number else 0.0)
            transcript = np.concatenate([transcript, draw(turn.ask)])
            completed = await broker.complete(session.request(transcript.tolist(), turn))
            answered.append(completed)
            # The simulator draws an answer after each question, and so must this.
            draw(turn.answer)
            transcript = np.concatenate([transcript, np.array(completed.tokens, np.uint32)])

    async with anyio.create_task_group() as tasks:
        for session in sessions:
            tasks.start_soon(agent, session)
    return answered, (await broker.statistics()).engine.sessions.replaced


def _totals(usage: Usage, displaced: int, waits: Sequence[float], took: float) -> Totals:
    p50, p99 = (float(each) for each in np.percentile(waits, (50, 99)))
    return Totals(
        ram=usage.ram_tokens,
        cold=usage.cold_tokens,
        prefilled=usage.prefilled_tokens,
        recomputed=usage.recomputed_tokens,
        displaced=displaced,
        ttft_p50=p50,
        ttft_p99=p99,
        seconds=took,
    )
