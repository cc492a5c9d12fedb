"""What the broker adds to decoding: scheduling, events, text and the way into the event loop."""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import mlx.core as mx

from bench.rates import Arrival, decode_rate
from bench.runner import compare
from bench.swarm_clients import Job, brokered
from bench.swarm_decode import fill, prefix_path
from bench.swarm_findings import Overhead
from bench.swarm_setup import Setup, supply
from mlx_swarm.broker.errors import InvalidSetting

LEAST = 4
"""Generated tokens."""


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

    Raises `InvalidSetting` for too few tokens to time.
    """
    if sizes.generated < LEAST:
        raise InvalidSetting(f"{sizes.generated} generated tokens are too few to time; {LEAST} do")
    prompts = supply(setup, sizes.rows).prompts(sizes.rows, sizes.shared, sizes.own)
    jobs = [Job(prompt, sizes.generated) for prompt in prompts]
    with brokered(setup, max_rows=sizes.rows) as clients:
        compared = compare(
            f"tokens a second of {sizes.rows} rows",
            {
                "broker": lambda: clients.run(jobs).decode_rate,
                "bare loop": _bare_loop(setup, sizes),
            },
            unit="tok/s",
            higher_is_better=True,
            warmup=2,
            repeats=sizes.repeats,
        )
    rows, shared, own, generated, _ = sizes
    yield Overhead(rows=rows, shared=shared, own=own, generated=generated, comparison=compared)


def _bare_loop(setup: Setup, sizes: OverheadSizes) -> Callable[[], float]:
    path = prefix_path(setup, sizes.shared)
    # The last token of a prompt belongs to the first step.
    tails = [sizes.own - 1] * sizes.rows

    def measure() -> float:
        batch = fill(setup, [path] * sizes.rows, tails, sizes.generated)
        start, arrivals = time.perf_counter(), list[Arrival]()
        for _ in range(sizes.generated):
            tokens = batch.step()
            seconds = time.perf_counter() - start
            arrivals += [Arrival(row, seconds) for row in range(len(tokens))]
        mx.synchronize()
        return decode_rate(arrivals)

    return measure
