"""Agents that look something up between two turns: their conversations stay in memory meanwhile.

python examples/agents_with_tools.py [MODEL]
"""

import argparse
import sys

import anyio

from mlx_swarm import Broker, Swarm, SwarmError

INSTRUCTIONS = """\
You tell people about the harbour. First you are asked which berth to look up: reply with its name
only. Then you are told what is known of it: reply with one friendly sentence.
"""
BERTHS = {"North": "free until 6", "South": "taken by a tug", "West": "closed for repairs"}
TOOL_SECONDS = 0.5


async def look_up(berth: str) -> str:
    """Stands for a tool that takes its time."""
    await anyio.sleep(TOOL_SECONDS)
    return BERTHS[berth]


async def guide(swarm: Swarm, berth: str) -> None:
    """One agent: a turn, a tool, and a turn that begins where the first one ended."""
    agent = swarm.spawn(f"What about the berth {berth}?", name=berth)
    await agent
    async with agent.tool(seconds=TOOL_SECONDS):
        known = await look_up(berth)
    reply = await agent.ask(f"It is {known}.")
    first, second = (turn.result.usage for turn in agent.turns if turn.result)
    kept = first.prompt_tokens + first.output_tokens
    print(f"{berth}: {reply!r} ({second.cached_tokens} of {kept} tokens were still there)")


async def run(model: str) -> None:
    """Let an agent a berth work, all at once."""
    async with (
        Broker(model) as broker,
        Swarm(broker, instructions=INSTRUCTIONS, max_tokens=30) as swarm,
        anyio.create_task_group() as tasks,
    ):
        for berth in BERTHS:
            tasks.start_soon(guide, swarm, berth)


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description="Agents that use a tool between two turns.")
    parser.add_argument("model", metavar="MODEL", nargs="?", default="smollm2-135m")
    given = parser.parse_args()
    try:
        anyio.run(run, given.model)
    except* SwarmError as errors:
        sys.exit("\n".join(str(error) for error in errors.exceptions))


if __name__ == "__main__":
    main()
