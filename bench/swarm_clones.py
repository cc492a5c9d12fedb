"""Memory of N running clones of one prefix: the prefix at rest, tails, workspace, transients."""

from collections.abc import Iterator
from typing import NamedTuple

from bench.swarm_clients import Job, brokered, memory_of
from bench.swarm_findings import Clones
from bench.swarm_setup import Setup, settle, supply


class CloneSizes(NamedTuple):
    """Agents, shared, own and generated tokens."""

    agents: int
    shared: int
    own: int
    generated: int


def clones(setup: Setup, sizes: CloneSizes) -> Iterator[Clones]:
    """The prefix is computed alone and stays; then all run, after as much of other tokens."""
    agents, shared, own, generated = sizes
    prompts = supply(setup, agents)
    with brokered(setup, max_rows=agents) as clients:
        clients.run([Job(prompt, generated) for prompt in prompts.prompts(agents, shared, own)])
        before = clients.statistics().memory.committed["extents"]
        jobs = [Job(prompt, generated) for prompt in prompts.prompts(agents, shared, own)]
        clients.run([Job(jobs[0].prompt[: shared + 1], 1)])
        resting = clients.statistics().memory.committed["extents"]
        active = settle()
        outcome = clients.run(jobs)
        memory = memory_of(outcome, active, resting)
    yield Clones(
        agents=agents,
        shared=shared,
        own=own,
        prefix_copy=setup.kv_bytes(shared),
        own_copy=agents * setup.kv_bytes(own - 1),
        at_rest=resting - before,
        memory=memory,
    )
