"""The demo's work: open a broker, let the agents run, say what it cost."""

import asyncio
import json
import sys
from contextlib import AsyncExitStack

import anyio
from msgspec import Struct
from rich.console import Console

from mlx_swarm.broker import Broker
from mlx_swarm.broker.backend import BLAS_HINT, describe
from mlx_swarm.broker.errors import InvalidRequest
from mlx_swarm.broker.interrupts import INTERRUPTS, STOPPING
from mlx_swarm.broker.models.cache_folder import kv_folder
from mlx_swarm.broker.request import Message

from ..swarm import Swarm
from .display import display_for
from .loading import LoadingDisplay
from .report import Run, read_run
from .tables import print_comparison, print_run
from .texts import handbook, tasks_for

LOADING_ENDS = "stopping as soon as loading allows"
AGENTS_END = "stopping after the current step, or piece of a prompt"
WRITING_ENDS = "the replies are being written to disk still, which takes 15 s at most"
MOST_AGENTS = 1024
LEAST_WIDTH = 20
MAX_TOKENS = 48
MAX_TOKENS_SLOW = 32


class Options(Struct, frozen=True, kw_only=True):
    """What to run. `max_tokens` None leaves it to the backend's speed."""

    agents: int = 8
    model: str = "smollm2-135m"
    max_tokens: int | None = None
    compare: bool = False
    cold: bool = True
    json: bool = False

    def validate(self) -> None:
        """Raise `InvalidRequest` for a number out of range."""
        if not 1 <= self.agents <= MOST_AGENTS:
            raise InvalidRequest(f"--agents is {self.agents}; it must be from 1 to {MOST_AGENTS}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequest(f"--max-tokens is {self.max_tokens}; it must be at least 1")


def run(options: Options) -> None:
    """Run the demo and print its outcome; raises `SwarmError`s as they come."""
    options.validate()
    if not anyio.run(_run_to_the_end, options):
        raise KeyboardInterrupt


async def _run_to_the_end(options: Options) -> bool:
    """False if a signal ended it. Cancelling a scope leaves what is shielded from it alone."""
    loop = asyncio.get_running_loop()
    with anyio.CancelScope() as scope:
        # The loop may be asleep, and a signal does not wake it.
        with INTERRUPTS.ended_by(lambda: loop.call_soon_threadsafe(scope.cancel)):
            await _run(options)
    return not scope.cancelled_caught


async def _run(options: Options) -> None:
    messages = _console(stderr=True)
    output = messages if options.json else _console()
    INTERRUPTS.notice = LOADING_ENDS
    async with AsyncExitStack() as stack:
        with LoadingDisplay(messages) as loading:
            cold = kv_folder() if options.cold and not options.compare else None
            broker = await stack.enter_async_context(
                Broker(options.model, cold=cold, progress=loading.report)
            )
        if slow := describe().is_slow:
            messages.print(BLAS_HINT, highlight=False, soft_wrap=True)
        demo = Demo(broker, options, output, slow)
        INTERRUPTS.notice = AGENTS_END
        if cold is not None:
            INTERRUPTS.notice += "; what is new is written to disk then"
        _announce(options, output, f"{_counted(options.agents)}, sharing their instructions …")
        shared, alone = await demo.run_agents("shared", sharing=True), None
        if options.compare:
            _announce(options, output, "the same without sharing …")
            alone = await demo.run_agents("alone", sharing=False)
        INTERRUPTS.notice = STOPPING if cold is None else WRITING_ENDS
    if alone:
        print_comparison(output, shared, alone)
    if options.json:
        report = shared.as_json() | ({"without_sharing": alone.as_json()} if alone else {})
        sys.stdout.write(json.dumps(report) + "\n")  # in ASCII, which every locale can print


def _announce(options: Options, output: Console, what: str) -> None:
    """Say what is silent for a while now; on a terminal the table shows it."""
    if not options.json and not output.is_terminal:
        output.out(what, highlight=False)


def _counted(agents: int) -> str:
    return "1 agent" if agents == 1 else f"{agents} agents"


def _console(*, stderr: bool = False) -> Console:
    """A console that is wide enough to print at all, whatever the environment says."""
    console = Console(stderr=stderr)
    if console.width < LEAST_WIDTH:
        console.width = LEAST_WIDTH
    return console


class Demo:
    """The same agents, run as often as asked, on one broker."""

    def __init__(self, broker: Broker, options: Options, output: Console, slow: bool) -> None:
        self._broker = broker
        self._output = output
        self._instructions = handbook(short=slow)
        self._max_tokens = options.max_tokens or (MAX_TOKENS_SLOW if slow else MAX_TOKENS)
        self._tasks = tasks_for(options.agents)

    async def run_agents(self, name: str, *, sharing: bool) -> Run:
        """Let all agents start at once, show them as they write, print what they cost."""
        display = display_for(self._output, [task.name for task in self._tasks])
        swarm = Swarm(
            self._broker,
            instructions=self._instructions,
            max_tokens=self._max_tokens,
            name=name,
            cache=sharing,
        )
        async with swarm:
            events = swarm.events()
            agents = [swarm.spawn(task.text, name=task.name) for task in self._tasks]
            with display:
                async for event in events:
                    display.show(event)
            texts = {agent.name: await agent for agent in agents}
        common = await self._instruction_tokens()
        run = read_run(self._broker.recorder.events(), name, common, texts)
        print_run(self._output, run, "shared" if sharing else "not shared")
        return run

    async def _instruction_tokens(self) -> int:
        """How long the agents' common beginning is: up to the end of the instructions."""
        conversation = [Message("system", self._instructions), Message("user", self._tasks[0].text)]
        rendered = await self._broker.render(conversation)
        return max(rendered.boundaries, default=0)
