"""The constants of the cost model, measured on this machine with a model that really runs.

Prefill is timed alone and together with others, at several prefixes; decode steps are those of a
broker's streams, so that all that it does for a token is in them. Every set of constants is the
one, none of them negative, that comes closest to what was timed.
"""

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import greedy_sampler

from bench.cold_rates import RateSizes, rates
from bench.cold_store import random_caches
from bench.runner import machine
from bench.simulate_costs import Costs, PrefillCosts, StepCosts
from bench.swarm_clients import Clients, Job, brokered
from bench.swarm_decode import prefix_path
from bench.swarm_records import today
from bench.swarm_setup import Setup, Tokens, prefill_rate, supply
from mlx_swarm.broker.backend import describe
from mlx_swarm.broker.engine.batch_test import batch_test
from mlx_swarm.broker.engine.decode_batch import DecodeBatch
from mlx_swarm.broker.engine.memory import weight_bytes
from mlx_swarm.broker.engine.pace import LEAST, LEAST_CUDA
from mlx_swarm.broker.engine.seat import Seat, zero_states
from mlx_swarm.broker.errors import InvalidSetting

Equation = tuple[tuple[float, ...], float]
"""What a timing consists of, and the seconds that it took."""


class CalibrateSizes(NamedTuple):
    """Tokens computed, prefixes before them, rows that decode, and the tokens that each gets."""

    chunks: Sequence[int] = (32, 128, 512)
    prefixes: Sequence[int] = (0, 1024, 4096)
    rows: Sequence[int] = (1, 8, 32)
    shared: Sequence[int] = (0, 512, 2048)
    own: Sequence[int] = (16, 256)
    generated: int = 32
    stored: int = 4096
    repeats: int = 3


def calibrate(setup: Setup, sizes: CalibrateSizes, folder: Path | None = None) -> Costs:
    """Measure everything; files are written to `folder` and removed."""
    verdict = batch_test(setup.loaded.model, setup.loaded.make_caches)
    prefill_rate(setup, supply(setup, 1).take(max(sizes.chunks)), repeats=1)
    alone = fit([_alone(setup, n, p, sizes) for n in sizes.chunks for p in sizes.prefixes])
    rests = [n for n in sizes.chunks if n <= verdict.prefill.tokens]
    together = fit([_together(setup, n, p, sizes) for n in rests for p in sizes.prefixes])
    steps = fit(_steps(setup, sizes))
    with tempfile.TemporaryDirectory(dir=folder) as parent:
        read, write = (
            float(line.figures["GB/s"]) * 1e9
            for line in rates(setup, RateSizes(sizes.stored, sizes.repeats), Path(parent))
        )
    return Costs(
        source=f"measured on {today()} with {setup.loaded.name}, {setup.loaded.dtype}; {machine()}",
        bytes_per_token=setup.layout.bytes_per_token,
        weight_bytes=weight_bytes(setup.loaded),
        alone=PrefillCosts(piece=alone[0], token=alone[1], key=alone[2]),
        together=PrefillCosts(piece=together[0], token=together[1], key=together[2]),
        step=StepCosts(step=steps[0], row=steps[1], own=steps[2], span=steps[3], look=steps[4]),
        turn=0.0,
        store=_store(setup, sizes),
        read_seconds=0.0,
        read_rate=read,
        write_rate=write,
        rest=verdict.prefill.tokens,
        rest_keys=verdict.prefill.keys,
        least_chunk=LEAST_CUDA if describe().device == "cuda" else LEAST,
    )


def fit(equations: Sequence[Equation]) -> list[float]:
    """The factors, none of them negative, with which the parts come closest to the seconds, each
    timing counted by its relative error.
    """
    parts = np.array([parts for parts, _ in equations], np.float64)
    seconds = np.array([seconds for _, seconds in equations], np.float64)
    scaled, kept = parts / seconds[:, None], list(range(parts.shape[1]))
    while True:
        factors = np.linalg.lstsq(scaled[:, kept], np.ones(len(seconds)), rcond=None)[0]
        if (factors >= 0).all():
            found = dict(zip(kept, factors.tolist(), strict=True))
            return [float(found.get(column, 0.0)) for column in range(parts.shape[1])]
        del kept[int(factors.argmin())]


def _keys(tokens: int, prefix: int) -> float:
    return tokens * prefix + tokens * tokens / 2


def _alone(setup: Setup, tokens: int, prefix: int, sizes: CalibrateSizes) -> Equation:
    given = supply(setup, tokens + prefix).take(tokens)

    def measure() -> float:
        fresh = setup.loaded.make_caches
        caches: Sequence[Any] = random_caches(setup.layout, prefix) if prefix else fresh()
        start = time.perf_counter()
        setup.loaded.model(mx.array([given]), cache=caches)
        mx.eval([cache.state for cache in caches])
        return time.perf_counter() - start

    return (1.0, tokens, _keys(tokens, prefix)), _median(measure, sizes.repeats)


def _together(setup: Setup, tokens: int, prefix: int, sizes: CalibrateSizes) -> Equation:
    given = supply(setup, tokens + prefix).take(tokens)
    path = prefix_path(setup, prefix)

    def measure() -> float:
        batch = DecodeBatch(setup.loaded.model, setup.layout)
        seat = Seat(
            path,
            [() for _ in setup.layout.leaves],
            zero_states(setup.layout),
            length=prefix,
            ahead=given,
            token=1,
            max_tokens=1,
            sampler=greedy_sampler,
        )
        mx.synchronize()
        start = time.perf_counter()
        batch.prefill([(seat, tokens)])
        mx.synchronize()
        return time.perf_counter() - start

    return (1.0, tokens, _keys(tokens, prefix)), _median(measure, sizes.repeats)


def _steps(setup: Setup, sizes: CalibrateSizes) -> list[Equation]:
    """Streams that all decode: rows, their own tokens, the shared ones, and all readings of these.

    Where no other row shares them, the broker decides what a row copies; so the shared ones are
    left out there.
    """
    found: list[Equation] = []
    prompts = supply(setup, sizes.generated)
    for rows in sizes.rows:
        with brokered(setup, max_rows=rows) as clients:
            for shared in sizes.shared if rows > 1 else (0,):
                for own in sizes.own:
                    agents = prompts.prompts(rows, shared, own)
                    seconds = _stream_seconds(clients, agents, sizes)
                    tails = rows * (own + sizes.generated / 2)
                    found.append(((1.0, rows, tails, shared, rows * shared), seconds))
    return found


def _stream_seconds(clients: Clients, prompts: Sequence[Tokens], sizes: CalibrateSizes) -> float:
    """Seconds of a step while all prompts are being answered."""
    jobs = [Job(prompt, sizes.generated) for prompt in prompts]

    def measure() -> float:
        rate = clients.run(jobs).decode_rate
        return len(jobs) / rate if rate else math.nan

    measure()  # once the prompts are in the cache, the streams begin together
    seconds = _median(measure, sizes.repeats)
    if math.isnan(seconds):
        raise InvalidSetting(f"{len(jobs)} streams of {sizes.generated} tokens never all decoded")
    return seconds


def _store(setup: Setup, sizes: CalibrateSizes) -> float:
    """Seconds for a token that is copied into an extent."""
    (piece,) = prefix_path(setup, sizes.stored)

    def measure() -> float:
        start = time.perf_counter()
        mx.eval([mx.array(buffer) + 0 for buffer in piece.extent.buffers])
        return time.perf_counter() - start

    return _median(measure, sizes.repeats) / sizes.stored


def _median(measure: Callable[[], float], repeats: int) -> float:
    """After a time that is not counted."""
    measure()
    return statistics.median(measure() for _ in range(repeats))
