"""What the broker adds to decoding: scheduling, events, text and the way into the event loop."""

import time
from collections.abc import Iterator
from typing import NamedTuple

import mlx.core as mx

from bench.rates import Arrival, decode_rate
from bench.runner import compare
from bench.swarm_clients import Job, brokered
from bench.swarm_decode import fill, prefix_path
from bench.swarm_findings import Overhead
from bench.swarm_setup import Setup, supply
from mlx_swarm.broker.errors import InvalidSetting


class OverheadSizes(NamedTuple):
    """Rows, shared, own and generated tokens."""

    rows: int
    shared: int
    own: int
    generated: int
    repeats: int = 5


def overhead(setup: Setup, sizes: OverheadSizes) -> Iterator[Overhead]:
    """Streams read to their end against a loop over a batch with equal rows: no queue, no events,
    no text. The prompts of both are in the cache; the time counts in which all rows decode.
    """
    if sizes.generated < 4:
        raise InvalidSetting(f"{sizes.generated} generated tokens leave nothing to time; 4 do")
    prompts = supply(setup, sizes.rows).prompts(sizes.rows, sizes.shared, sizes.own)
    jobs = [Job(prompt, sizes.generated) for prompt in prompts]
    path = prefix_path(setup, sizes.shared)

    def bare_loop() -> float:
        # The last token of a prompt belongs to the first step.
        tails = [sizes.own - 1] * sizes.rows
        batch = fill(setup, [path] * sizes.rows, tails, sizes.generated)
        start, arrivals = time.perf_counter(), list[Arrival]()
        for _ in range(sizes.generated):
            tokens = batch.step()
            seconds = time.perf_counter() - start
            arrivals += [Arrival(row, seconds) for row in range(len(tokens))]
        mx.synchronize()
        return decode_rate(arrivals)

    with brokered(setup, max_rows=sizes.rows) as clients:
        compared = compare(
            f"tokens a second of {sizes.rows} rows",
            {"broker": lambda: clients.run(jobs).decode_rate, "bare loop": bare_loop},
            unit="tok/s",
            higher_is_better=True,
            warmup=2,
            repeats=sizes.repeats,
        )
    yield Overhead(
        rows=sizes.rows,
        shared=sizes.shared,
        own=sizes.own,
        generated=sizes.generated,
        comparison=compared,
    )
