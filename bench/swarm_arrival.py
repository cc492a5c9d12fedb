"""N agents at once on a prefix: when their first tokens come, how fast they go on, what it takes.

The first arrival, which compiles and allocates, stands apart; every cold one has a new prefix.
"""

from collections.abc import Iterator
from typing import NamedTuple

from bench.swarm_clients import (
    Clients,
    Job,
    Outcome,
    brokered,
    median_by,
    memory_of,
    rows_that_fit,
    run_replicated,
)
from bench.swarm_findings import Arrival, Memory
from bench.swarm_setup import Setup, Supply, Tokens, distinct_tokens, prefill_rate, settle, supply
from bench.swarm_trace import shares

OURS, THEIRS = "mlx-swarm", "mlx-lm"


class ArrivalSizes(NamedTuple):
    """Agents, shared, own and generated tokens; of `repeats` cold arrivals the one with the middle
    last first token counts.
    """

    agents: int
    shared: int
    own: int
    generated: int
    repeats: int = 3


class _Run(NamedTuple):
    outcome: Outcome
    memory: Memory


def arrival(setup: Setup, sizes: ArrivalSizes) -> Iterator[Arrival]:
    """First use, cold, and with the prefix cached."""
    prompts = supply(setup, sizes.agents)
    rate = prefill_rate(setup, prompts.take(sizes.shared + sizes.own))
    with brokered(setup, max_rows=sizes.agents) as clients:
        first = _ours(clients, _jobs(prompts, sizes))
        yield _found(sizes, OURS, "first use", first, rate)
        cold = [_ours(clients, _jobs(prompts, sizes)) for _ in range(sizes.repeats)]
        middle = cold[median_by([run.outcome for run in cold], lambda each: each.waits[-1])]
        yield _found(sizes, OURS, "cold", middle, rate)
        prefix = cold[-1].outcome.jobs[0].prompt[: sizes.shared]
        cached = _ours(clients, _jobs(prompts, sizes, prefix))
        yield _found(sizes, OURS, "prefix cached", cached, rate)


def replicated_arrival(setup: Setup, sizes: ArrivalSizes) -> Iterator[Arrival]:
    """mlx-lm's, cold and with the prefix cached, with as many rows at a time as fit."""
    prompts = supply(setup, sizes.agents)
    rate = prefill_rate(setup, prompts.take(sizes.shared + sizes.own))
    rows = rows_that_fit(setup, jobs := _jobs(prompts, sizes))
    if not rows:
        return
    # Something short first: it compiles what mlx-lm needs too.
    run_replicated(setup, _jobs(prompts, sizes._replace(shared=16, generated=4)), rows)
    for variant, cached in (("cold", 0), ("prefix cached", sizes.shared)):
        before = settle()
        outcome = run_replicated(setup, jobs, rows, cached)
        run = _Run(outcome, memory_of(outcome, before))
        system = THEIRS if rows == sizes.agents else f"{THEIRS}, {rows} rows at a time"
        yield _found(sizes, system, variant, run, rate)


def _jobs(prompts: Supply, sizes: ArrivalSizes, prefix: Tokens | None = None) -> list[Job]:
    prefix = prompts.take(sizes.shared) if prefix is None else prefix
    return [Job([*prefix, *prompts.take(sizes.own)], sizes.generated) for _ in range(sizes.agents)]


def _ours(clients: Clients, jobs: list[Job]) -> _Run:
    extents = clients.statistics().memory.committed["extents"]
    before = settle()
    outcome = clients.run(jobs)
    return _Run(outcome, memory_of(outcome, before, extents))


def _found(sizes: ArrivalSizes, system: str, variant: str, run: _Run, rate: float) -> Arrival:
    outcome, waits = run.outcome, run.outcome.waits
    distinct = distinct_tokens([job.prompt for job in outcome.jobs])
    if variant == "prefix cached":
        distinct -= sizes.shared
    return Arrival(
        system=system,
        variant=variant,
        agents=sizes.agents,
        shared=sizes.shared,
        own=sizes.own,
        generated=sizes.generated,
        first=waits[0],
        median=waits[len(waits) // 2],
        last=waits[-1],
        total=outcome.total,
        decode_rate=outcome.decode_rate,
        computed=outcome.computed,
        distinct=distinct,
        prefill_rate=rate,
        bar_seconds=distinct / rate,
        memory=run.memory,
        shares=shares(outcome.events) if outcome.events else None,
    )
