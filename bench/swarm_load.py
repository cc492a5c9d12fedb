"""Mixed load: agents with one of a few instruction sets each, that arrive one after the other."""

from collections.abc import Iterator
from typing import NamedTuple

import mlx.core as mx

from bench.swarm_clients import (
    Job,
    Outcome,
    brokered,
    rows_that_fit,
    run_replicated,
    spread,
)
from bench.swarm_decode import prefix_path, shared_steps, tail_lengths
from bench.swarm_findings import Load
from bench.swarm_setup import Setup, Supply, distinct_tokens, settle, supply

Range = tuple[int, int]

BUSY = 0.8
"""Without a rate, agents arrive as fast as a full batch works off so much of."""

STEPS = 16
"""Steps for the rate."""


class LoadSizes(NamedTuple):
    """How many agents and instruction sets, and from and to how many tokens of each kind.

    `rate` is in arrivals a second; 0 takes one from the measured decode step.
    """

    agents: int
    sets: int
    instructions: Range
    own: Range
    generated: Range
    rate: float = 0.0
    seed: int = 1


def load(setup: Setup, sizes: LoadSizes) -> Iterator[Load]:
    """The broker's, after as much of other tokens; then mlx-lm's at the same times, as many
    rows at a time as fit."""
    rate = sizes.rate or usual_rate(setup, sizes)
    prompts = supply(setup, sizes.seed)
    with brokered(setup, max_rows=sizes.agents) as clients:
        clients.run(make_jobs(prompts, sizes, rate))
        jobs, before = make_jobs(prompts, sizes, rate), settle()
        outcome = clients.run(jobs)
        peak = mx.get_peak_memory() - before
    yield _found("mlx-swarm", sizes, rate, outcome, peak)
    if rows := rows_that_fit(setup, jobs):
        short = [job._replace(prompt=job.prompt[:16], at=0.0) for job in jobs[:rows]]
        run_replicated(setup, short, rows)
        before = settle()
        outcome = run_replicated(setup, jobs, rows)
        system = f"mlx-lm, {rows} rows at a time"
        yield _found(system, sizes, rate, outcome, mx.get_peak_memory() - before)


def usual_rate(setup: Setup, sizes: LoadSizes) -> float:
    """Arrivals a second that keep a batch of all agents busy, but for a margin."""
    path = prefix_path(setup, sum(sizes.instructions) // 2)
    tails = tail_lengths(sizes.agents, sum(sizes.own) // 2)
    milliseconds = shared_steps(setup, [path] * sizes.agents, tails, STEPS)()
    return BUSY * sizes.agents * 1e3 / (milliseconds * sum(sizes.generated) / 2)


def make_jobs(prompts: Supply, sizes: LoadSizes, rate: float) -> list[Job]:
    """Poisson arrivals; each agent draws its instructions, and how long its own part is."""
    random = prompts.random
    lengths = random.integers(*sizes.instructions, sizes.sets, endpoint=True)
    instructions = [prompts.take(int(length)) for length in lengths]
    times = random.exponential(1 / rate, sizes.agents).cumsum()
    return [
        Job(
            [
                *instructions[int(random.integers(sizes.sets))],
                *prompts.take(int(random.integers(*sizes.own, endpoint=True))),
            ],
            int(random.integers(*sizes.generated, endpoint=True)),
            float(at),
        )
        for at in times
    ]


def _found(system: str, sizes: LoadSizes, rate: float, outcome: Outcome, peak: int) -> Load:
    prompts = [job.prompt for job in outcome.jobs]
    return Load(
        system=system,
        agents=sizes.agents,
        sets=sizes.sets,
        arrivals_a_second=rate,
        first_tokens=spread(outcome.waits),
        gaps=spread(outcome.gaps),
        total=outcome.total,
        generated=outcome.tokens,
        prompt_tokens=sum(map(len, prompts)),
        distinct=distinct_tokens(prompts),
        computed=outcome.computed,
        peak_bytes=peak,
    )
