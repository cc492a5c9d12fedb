"""`python -m bench.swarm`: what sharing a prefix saves, against mlx-lm in the same run.

Decode steps of N rows over a shared prefix; N agents that arrive at once on a cold prefix, with
what they take of memory; and what the broker adds to a bare loop over the same model and attention.
The small default fits a CPU; `--model` with the shape of Llama-3-8B and larger sizes a GPU.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import anyio
import mlx.core as mx
import msgspec
import numpy as np
from mlx_lm.generate import BatchGenerator
from msgspec import Struct
from rich.console import Console

from bench.rates import Arrival, decode_rate
from bench.runner import Comparison, Report, compare, machine, positive, run, table
from bench.swarm_steps import replicated_steps, shared_steps, stock_steps
from mlx_swarm.broker.broker import Broker
from mlx_swarm.broker.cache.layout import Layout
from mlx_swarm.broker.engine.batch_test import batch_test
from mlx_swarm.broker.engine.self_test import self_test
from mlx_swarm.broker.models import LoadedModel, load
from mlx_swarm.broker.request import Completed, Delta, Request

LLAMA_8B = (
    "synthetic:llama?layers=32&hidden=4096&heads=32&kv_heads=8&intermediate=14336&vocab=128256"
    "&context=65536"
)
SMALL = "synthetic:llama?layers=4&hidden=256&heads=8&kv_heads=2&intermediate=512&context=65536"


class Swarm(Struct, frozen=True, kw_only=True):
    """N agents at once on a cold prefix. Seconds from their arrival; bytes above the weights."""

    system: str
    agents: int
    shared: int
    own: int
    generated: int
    first: float
    median: float
    last: float
    total: float
    tokens_per_second: float
    decode_tokens_per_second: float
    prefilled: int
    peak_bytes: int
    running_bytes: int
    tail_bytes: int
    prefix_bytes: int
    bar_seconds: float
    """What prefix and suffixes take at the measured prefill rate."""


class Results(Struct, frozen=True, kw_only=True):
    """Everything that one run measured."""

    report: Report
    swarms: tuple[Swarm, ...]


class Sizes(NamedTuple):
    """Agents, shared, own and generated tokens."""

    agents: int
    shared: int
    own: int
    generated: int


def main() -> None:
    """Measure as the command line asks for."""
    options = _options()
    console = Console(width=120, file=sys.stderr)
    loaded = load(options.model, dtype=options.dtype)
    comparisons = []
    layout = _layout(loaded)
    for pair in options.steps:
        rows, shared = (int(number) for number in pair.split("x"))
        comparisons.append(_steps(loaded, layout, rows, shared, options))
        console.print(table(comparisons[-1]))
    swarms: list[Swarm] = []
    for quadruple in options.swarms:
        sizes = Sizes(*(int(number) for number in quadruple.split("x")))
        for swarm in _swarms(loaded, layout, sizes, options):
            console.print(msgspec.to_builtins(swarm))
            swarms.append(swarm)
    settings = {"model": options.model, "dtype": options.dtype or "", "tail": options.tail}
    report = Report(
        benchmark="swarm", machine=machine(), settings=settings, comparisons=tuple(comparisons)
    )
    results = msgspec.json.format(
        msgspec.json.encode(Results(report=report, swarms=tuple(swarms)))
    ).decode()
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            file.write(results + "\n")
    else:
        sys.stdout.write(results + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.swarm", description=__doc__)
    parser.add_argument("--model", default=SMALL, help="a model, or `llama-8b` for its shape")
    parser.add_argument("--dtype")
    parser.add_argument("--steps", nargs="*", default=["8x512"], help="rows x shared tokens")
    parser.add_argument(
        "--swarms", nargs="*", default=["8x512x16x16"], help="N x shared x own x out"
    )
    parser.add_argument("--tail", type=positive, default=128, help="mean tail of the decode steps")
    parser.add_argument("--count", type=positive, default=24, help="steps of one measurement")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--chunk", type=positive, default=2048, help="prefill chunk of the broker")
    parser.add_argument("--ram", default="2GiB")
    parser.add_argument("--replicate", type=int, default=1 << 62, help="bytes mlx-lm may take")
    parser.add_argument("--json", help="write everything to this file")
    options = parser.parse_args()
    options.model = LLAMA_8B if options.model == "llama-8b" else options.model
    return options


def _layout(loaded: LoadedModel) -> Layout:
    self_test(loaded.model)
    verdict = batch_test(loaded.model, loaded.make_caches)
    assert verdict.layout is not None, verdict.test.reason
    return verdict.layout


def _steps(
    loaded: LoadedModel, layout: Layout, rows: int, shared: int, options: argparse.Namespace
) -> Comparison:
    sizes = {"tail": options.tail, "steps": options.count}
    contenders: dict[str, Callable[[], float]] = {
        "shared": shared_steps(loaded.model, layout, rows, shared, **sizes)
    }
    replicated = rows * (shared + 2 * options.tail) * layout.bytes_per_token
    if replicated <= options.replicate:
        contenders["mlx-lm"] = replicated_steps(
            loaded.model, layout, rows, shared, tail=options.tail, steps=min(4, options.count)
        )
    contenders["stock without the prefix"] = stock_steps(loaded.model, layout, rows, **sizes)
    name = f"decode step, {rows} rows x {shared} shared tokens"
    compared = compare(name, contenders, unit="ms", repeats=options.repeats)
    gc.collect()
    mx.clear_cache()
    return compared


def _swarms(
    loaded: LoadedModel, layout: Layout, sizes: Sizes, options: argparse.Namespace
) -> list[Swarm]:
    prompts = _prompts(sizes)
    rate = _prefill_rate(loaded, prompts[0], options.chunk)
    results = [_brokered(loaded, layout, sizes, options, prompts, rate)]
    # mlx-lm holds the rows twice while it merges them.
    needed = 2 * sizes.agents * (len(prompts[0]) + sizes.generated) * layout.bytes_per_token
    if needed <= options.replicate:
        results.append(_mlx_lm(loaded, layout, sizes, prompts, rate))
    return results


def _prompts(sizes: Sizes) -> list[list[int]]:
    rng = np.random.default_rng(sizes.agents)
    shared = rng.integers(10, 250, sizes.shared).tolist()
    return [[*shared, *rng.integers(10, 250, sizes.own).tolist()] for _ in range(sizes.agents)]


def _prefill_rate(loaded: LoadedModel, prompt: list[int], chunk: int) -> float:
    """Tokens a second of mlx-lm's caches and the stock model, chunk by chunk."""
    seconds = []
    for _ in range(2):
        caches = loaded.make_caches()
        start = time.perf_counter()
        for at in range(0, len(prompt), chunk):
            loaded.model(mx.array([prompt[at : at + chunk]]), cache=caches)
            mx.eval([cache.state for cache in caches])
        seconds.append(time.perf_counter() - start)
    return len(prompt) / min(seconds)


class _Loaded(Broker):
    """A broker over a model that is loaded already."""

    given: Any = None

    def _load(self, progress: object) -> Any:
        return self.given


def _brokered(
    loaded: LoadedModel,
    layout: Layout,
    sizes: Sizes,
    options: argparse.Namespace,
    prompts: list[list[int]],
    rate: float,
) -> Swarm:
    broker = _Loaded(
        options.model, ram=options.ram, max_rows=sizes.agents, prefill_chunk=options.chunk
    )
    broker.given = loaded
    before = _settle()
    arrivals: list[Arrival] = []
    ends: list[Completed] = []
    memory = [0, 0]

    async def run() -> None:
        async with broker:
            start, begun, all_begun = time.perf_counter(), set[int](), anyio.Event()

            async def agent(row: int) -> None:
                request = Request(tokens=prompts[row], max_tokens=sizes.generated)
                async with broker.stream(request) as stream:
                    async for event in stream:
                        if isinstance(event, Delta) and event.tokens:
                            seconds = time.perf_counter() - start
                            arrivals.append(Arrival(row, seconds, len(event.tokens)))
                            begun.add(row)
                            if len(begun) == sizes.agents:
                                all_begun.set()
                        elif isinstance(event, Completed):
                            ends.append(event)

            async def watch() -> None:
                await all_begun.wait()
                memory[0] = await broker._running().call(lambda _: mx.get_active_memory())
                lane = (await broker.statistics()).engine.lane
                memory[1] = lane.batch.tails.bytes

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch)
                for row in range(sizes.agents):
                    tasks.start_soon(agent, row)

    anyio.run(run)
    prefilled = sum(end.usage.prefilled_tokens for end in ends)
    return _swarm("mlx-swarm", layout, sizes, arrivals, rate, prefilled, before, memory)


def _mlx_lm(
    loaded: LoadedModel, layout: Layout, sizes: Sizes, prompts: list[list[int]], rate: float
) -> Swarm:
    before = _settle()
    generator = BatchGenerator(
        loaded.model, max_tokens=sizes.generated, completion_batch_size=sizes.agents
    )
    start, arrivals = time.perf_counter(), list[Arrival]()
    rows = {name: row for row, name in enumerate(generator.insert(prompts))}
    memory = [0, 0]
    while responses := generator.next_generated():
        seconds = time.perf_counter() - start
        arrivals += [Arrival(rows[response.uid], seconds) for response in responses]
        if len(responses) == sizes.agents and not memory[0]:
            memory[0] = mx.get_active_memory()
    generator.close()
    prefilled = sum(map(len, prompts))
    return _swarm("mlx-lm", layout, sizes, arrivals, rate, prefilled, before, memory)


def _settle() -> int:
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    return mx.get_active_memory()


def _swarm(
    system: str,
    layout: Layout,
    sizes: Sizes,
    arrivals: list[Arrival],
    rate: float,
    prefilled: int,
    before: int,
    memory: list[int],
) -> Swarm:
    first: dict[int, float] = {}
    for arrival in arrivals:
        first.setdefault(arrival.row, arrival.seconds)
    waits = sorted(first.values())
    total = max(arrival.seconds for arrival in arrivals)
    tokens = sum(arrival.tokens for arrival in arrivals)
    try:
        steady = decode_rate(arrivals)
    except ValueError:  # the first were done before the last began
        steady = 0.0
    return Swarm(
        system=system,
        agents=sizes.agents,
        shared=sizes.shared,
        own=sizes.own,
        generated=sizes.generated,
        first=waits[0],
        median=waits[len(waits) // 2],
        last=waits[-1],
        total=total,
        tokens_per_second=tokens / total,
        decode_tokens_per_second=steady,
        prefilled=prefilled,
        peak_bytes=mx.get_peak_memory() - before,
        running_bytes=max(0, memory[0] - before),
        tail_bytes=memory[1],
        prefix_bytes=sizes.shared * layout.bytes_per_token,
        bar_seconds=(sizes.shared + sizes.agents * sizes.own) / rate,
    )


if __name__ == "__main__":
    run(main)
