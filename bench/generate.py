"""`python -m bench.generate`: prefill and decode of the broker against mlx-lm alone.

Same weights, same dtype, same prompts (random tokens, new ones every time, so that nothing is
cached), greedy. Times are taken where tokens arrive: for the broker in the event loop, after the
engine thread, text and events; for mlx-lm in the loop around its generator.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import anyio
import numpy as np
from anyio.from_thread import BlockingPortal, start_blocking_portal
from mlx_lm.generate import BatchGenerator, stream_generate
from msgspec.structs import replace
from rich.console import Console

from bench.rates import Arrival, decode_rate, job_rate, prefill_rate
from bench.runner import Comparison, Report, compare, machine, positive, run, table
from mlx_swarm.broker.broker import Broker
from mlx_swarm.broker.models import LoadedModel, load
from mlx_swarm.broker.request import Delta, Request, Started

# Random prompts may begin alike.
CHANCE = 4

Prompt = list[int]
Rate = Callable[[Sequence[Arrival]], float]


class Side(Protocol):
    """One of the two systems compared."""

    def run(self, prompts: list[Prompt], max_tokens: int) -> list[Arrival]: ...


class MlxLm:
    """mlx-lm alone: its generator for one prompt, its batch generator for several."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model

    def run(self, prompts: list[Prompt], max_tokens: int) -> list[Arrival]:
        """Continue the prompts side by side."""
        if len(prompts) == 1:
            return self._one(prompts[0], max_tokens)
        tokenizer = self._model.tokenizer
        generator = BatchGenerator(
            self._model.model,
            max_tokens=max_tokens,
            stop_tokens=[[token] for token in tokenizer.eos_token_ids],
        )
        start, arrivals = time.perf_counter(), []
        rows = {name: row for row, name in enumerate(generator.insert(prompts))}
        while responses := generator.next_generated():
            seconds = time.perf_counter() - start
            arrivals += [Arrival(rows[response.uid], seconds) for response in responses]
        generator.close()
        return arrivals

    def _one(self, prompt: Prompt, max_tokens: int) -> list[Arrival]:
        model, tokenizer = self._model.model, self._model.tokenizer
        start = time.perf_counter()
        generated = stream_generate(model, tokenizer, prompt, max_tokens=max_tokens)
        return [Arrival(0, time.perf_counter() - start) for _ in generated]


class Brokered:
    """The broker, from an event loop in another thread."""

    def __init__(self, portal: BlockingPortal, broker: Broker) -> None:
        self._portal = portal
        self._broker = broker

    def run(self, prompts: list[Prompt], max_tokens: int) -> list[Arrival]:
        """Continue the prompts side by side."""
        return self._portal.call(self._run, prompts, max_tokens)

    async def _run(self, prompts: list[Prompt], max_tokens: int) -> list[Arrival]:
        start, arrivals = time.perf_counter(), list[Arrival]()

        async def run_row(row: int, prompt: Prompt) -> None:
            request = Request(tokens=prompt, max_tokens=max_tokens)
            async with self._broker.stream(request) as response:
                async for event in response:
                    if isinstance(event, Started) and event.ram_tokens > CHANCE:
                        raise ValueError(f"{event.ram_tokens} prompt tokens came from the cache")
                    if isinstance(event, Delta):
                        seconds = time.perf_counter() - start
                        arrivals.append(Arrival(row, seconds, len(event.tokens)))

        async with anyio.create_task_group() as tasks:
            for row, prompt in enumerate(prompts):
                tasks.start_soon(run_row, row, prompt)
        return arrivals


@contextmanager
def brokered(model: str, dtype: str, ram: str) -> Iterator[Brokered]:
    """A broker with an event loop of its own."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(Broker(model, dtype=dtype, ram=ram)) as broker,
    ):
        yield Brokered(portal, broker)


class Prompts:
    """An endless supply of prompts of random tokens; two of the same seed give the same ones."""

    def __init__(self, vocabulary: int, length: int, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._vocabulary = vocabulary
        self._length = length

    def take(self, rows: int) -> list[Prompt]:
        """The next `rows` prompts; special tokens, which sit at the ends, are left out."""
        low, high = self._vocabulary // 10, self._vocabulary * 9 // 10
        tokens: list[Prompt] = self._random.integers(low, high, (rows, self._length)).tolist()
        return tokens


def main(arguments: Sequence[str] | None = None) -> Report:
    """Measure, print and write the report."""
    options = _parse(arguments)
    model = load(options.model, dtype=options.dtype)
    with brokered(options.model, model.dtype, options.ram) as broker:
        sides: dict[str, Side] = {"mlx-swarm": broker, "mlx-lm": MlxLm(model)}
        settings = vars(options) | {"dtype": model.dtype}
        report = Report(benchmark="bench.generate", machine=machine(), settings=settings)
        report.print(console := Console())
        for comparison in _comparisons(sides, int(model.config["vocab_size"]), options):
            console.print(table(comparison))
            report = replace(report, comparisons=(*report.comparisons, comparison))
    if options.json:
        report.write(options.json)
    return report


def _comparisons(
    sides: dict[str, Side], vocabulary: int, options: argparse.Namespace
) -> Iterator[Comparison]:
    length, output, rows = options.prompt_tokens, options.output_tokens, options.rows
    # One supply a side for the whole benchmark: a prompt that came before would be cached.
    supplies = {label: Prompts(vocabulary, length) for label in sides}

    def compared(name: str, count: int, max_tokens: int, rate: Rate) -> Comparison:
        def contender(label: str) -> Callable[[], float]:
            return lambda: rate(sides[label].run(supplies[label].take(count), max_tokens))

        return compare(
            name,
            {label: contender(label) for label in sides},
            unit="tok/s",
            higher_is_better=True,
            warmup=options.warmup,
            repeats=options.repeats,
        )

    yield compared(f"prefill, 1 x {length}", 1, 1, lambda seen: prefill_rate(length, seen))
    yield compared("decode, 1 row", 1, output, decode_rate)
    yield compared(f"decode, {rows} rows", rows, output, decode_rate)
    yield compared(f"whole job, {rows} x ({length} + {output})", rows, output, job_rate)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.generate", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default=None, help="float32, float16 or bfloat16")
    parser.add_argument("--ram", default="2GiB", help="the broker's cache")
    parser.add_argument("--prompt-tokens", type=positive, default=128)
    parser.add_argument("--output-tokens", type=positive, default=32)
    parser.add_argument("--rows", type=positive, default=8)
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--json", default="", help="a file for the report")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run(main)
