"""The parts of `bench.serve`, and their sizes on a GPU and on a CPU."""

import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

from anyio.from_thread import start_blocking_portal
from msgspec import Struct

from bench.runner import Comparison, compare
from bench.serve_clients import (
    ChatJob,
    Outcome,
    chat,
    over_http,
    over_one_socket,
    over_sockets,
    through_api,
)
from bench.serve_servers import Server, stock_server, swarm_server
from bench.swarm_findings import Bar
from mlx_swarm.broker import Broker

WIRE_BAR = 0.97
WORDS = "Read the change, name what is wrong in it, and say how to mend it. "
API, ONE, MANY, SWARM, STOCK = "Python API", "one socket", "sockets", "mlx-swarm", "mlx_lm.server"


class ServeScale(NamedTuple):
    """`instructions` and `asked` are in characters, `output` in tokens."""

    model: str
    streams: int
    clients: int
    instructions: int
    asked: int
    output: int
    repeats: int
    ram: str = "4GiB"


class ServeFound(Struct, frozen=True, kw_only=True):
    """What a part found."""

    comparison: Comparison
    bars: tuple[Bar, ...] = ()
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """To be read while others are still measured."""
        return [*self.notes, *map(str, self.bars)]


def streams(model: str, scale: ServeScale) -> Iterator[ServeFound]:
    """Tokens a second of many streams whose prompts are cached: what is between them and the API.

    The API's are in the process of its broker, as they are for who uses it.
    """
    jobs = _jobs(scale, scale.streams)
    with swarm_server(model, rows=scale.streams, ram=scale.ram) as server:
        with start_blocking_portal() as portal:
            broker = Broker(model, ram=scale.ram, max_rows=scale.streams)
            with portal.wrap_async_context_manager(broker):
                compared = compare(
                    f"tokens a second of {scale.streams} streams",
                    {
                        ONE: lambda: portal.call(over_one_socket, server, jobs).rate,
                        f"{scale.streams} {MANY}": lambda: (
                            portal.call(over_sockets, server, jobs).rate
                        ),
                        API: lambda: portal.call(through_api, broker, jobs).rate,
                    },
                    unit="tok/s",
                    higher_is_better=True,
                    warmup=2,
                    repeats=scale.repeats,
                )
    bars = [
        Bar(f"{ratio.contender} over the {API}", ratio.value, WIRE_BAR, least=True)
        for ratio in compared.ratios
    ]
    yield ServeFound(comparison=compared, bars=tuple(bars))


def turns(model: str, scale: ServeScale) -> Iterator[ServeFound]:
    """Seconds to the first token of a chat's second turn, whose history the client sends again,
    against those of its first turn.
    """
    seconds: dict[str, list[float]] = {"second turn": [], "first turn": []}
    computed: list[int] = []
    with swarm_server(model, rows=scale.streams, ram=scale.ram) as server:
        for number in range(scale.repeats + 1):
            job = _job(scale, number, f"Chat {number}. ")
            messages: list[object] = [
                {"role": "system", "content": job.instructions},
                {"role": "user", "content": job.asked},
            ]
            first, text = chat(server, messages, scale.output)
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": "And what else?"},
            ]
            second, _ = chat(server, messages, scale.output)
            if number:
                seconds["first turn"].append(first.first)
                seconds["second turn"].append(second.first)
                computed.append(second.prompt - second.cached)
    kept = {name: iter(values) for name, values in seconds.items()}
    compared = compare(
        "seconds to the first token of a turn",
        {name: values.__next__ for name, values in kept.items()},
        warmup=0,
        repeats=scale.repeats,
    )
    note = f"second turns computed {statistics.median(computed):g} prompt tokens"
    yield ServeFound(comparison=compared, notes=(note,))


def stock(model: str, scale: ServeScale) -> Iterator[ServeFound]:
    """Clients that share instructions and come at once: this server and mlx-lm's.

    The instructions are new in every round.
    """
    outcomes: dict[str, list[Outcome]] = {SWARM: [], STOCK: []}
    rounds = itertools.count()
    with (
        swarm_server(model, rows=scale.clients, ram=scale.ram) as ours,
        stock_server(model, rows=scale.clients) as theirs,
    ):

        def measure(name: str, server: Server) -> Outcome:
            outcome = over_http(server, _jobs(scale, scale.clients, f"Round {next(rounds)}. "))
            outcomes[name].append(outcome)
            return outcome

        compared = compare(
            f"tokens a second of {scale.clients} clients",
            {
                SWARM: lambda: measure(SWARM, ours).rate,
                STOCK: lambda: measure(STOCK, theirs).rate,
            },
            unit="tok/s",
            higher_is_better=True,
            repeats=scale.repeats,
        )
    notes = []
    for name, rounds_of in outcomes.items():
        firsts = sorted(each.first for outcome in rounds_of[1:] for each in outcome.came)
        computed = statistics.median(outcome.computed for outcome in rounds_of[1:])
        notes.append(
            f"{name}: first token p50 {statistics.median(firsts):.2f} s, last {firsts[-1]:.2f} s; "
            f"{computed:,.0f} prompt tokens computed a round"
        )
    yield ServeFound(comparison=compared, notes=tuple(notes))


PARTS: dict[str, Callable[[str, ServeScale], Iterator[ServeFound]]] = {
    "streams": streams,
    "turns": turns,
    "stock": stock,
}
PRESETS = {
    "cpu": ServeScale("smollm2-135m", 64, 16, 1500, 120, 24, 3),
    "gpu": ServeScale(
        "synthetic:llama?layers=16&hidden=2048&heads=32&kv_heads=8&intermediate=8192&vocab=128256"
        "&context=32768",
        64,
        16,
        4000,
        400,
        128,
        5,
        "16GiB",
    ),
}


def _jobs(scale: ServeScale, count: int, head: str = "") -> list[ChatJob]:
    return [_job(scale, number, head) for number in range(count)]


def _job(scale: ServeScale, number: int, head: str) -> ChatJob:
    """Instructions that begin with `head`, and a question of that number's own."""
    instructions = head + WORDS * (scale.instructions // len(WORDS))
    asked = f"Change {number}: " + "x" * (number % 7) + WORDS * (scale.asked // len(WORDS))
    return ChatJob(instructions, asked, scale.output)
