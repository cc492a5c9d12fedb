"""Requests that arrive over time, at the broker through its API and at mlx-lm's `BatchGenerator`.

Times are taken where tokens arrive: in the event loop, after the engine thread, text and events;
for mlx-lm in the loop around its generator.
"""

import copy
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar, TypeVarTuple, Unpack

import anyio
import mlx.core as mx
import numpy as np
from anyio.from_thread import BlockingPortal, start_blocking_portal
from mlx_lm.generate import BatchGenerator

from bench.rates import Arrival, decode_rate
from bench.swarm_findings import Memory, Spread
from bench.swarm_setup import PREFILL_CHUNK, Setup, Tokens
from mlx_swarm.broker.broker import Broker
from mlx_swarm.broker.engine.settings import EngineStatistics
from mlx_swarm.broker.models import LoadedModel
from mlx_swarm.broker.request import Completed, Delta, Request
from mlx_swarm.broker.trace.events import Event

MERGED_COPIES = 3.25
"""Copies of its rows' KV that mlx-lm holds at its peak, when it merges them, as measured."""

PREFILLED_AT_ONCE = 8
"""mlx-lm's default."""

Result = TypeVar("Result")
Given = TypeVarTuple("Given")


class Job(NamedTuple):
    """A prompt that arrives `at` seconds after the start."""

    prompt: Tokens
    max_tokens: int
    at: float = 0.0


class Sample(NamedTuple):
    """Bytes in use when all rows had begun; of the broker also its statistics."""

    active: int
    engine: EngineStatistics | None = None


class Outcome(NamedTuple):
    """Seconds from the start at which each row's tokens arrived, and prompt tokens computed; of the
    broker also the trace of it.
    """

    jobs: Sequence[Job]
    arrivals: list[Arrival]
    computed: int
    running: Sample
    events: Sequence[Event] = ()

    @property
    def waits(self) -> list[float]:
        """Seconds from every job's arrival to its first token, ascending."""
        first: dict[int, float] = {}
        for arrival in self.arrivals:
            first.setdefault(arrival.row, arrival.seconds - self.jobs[arrival.row].at)
        return sorted(first.values())

    @property
    def gaps(self) -> list[float]:
        """Seconds between the tokens of a row; tokens that came together count as one."""
        times: dict[int, list[float]] = {}
        for arrival in self.arrivals:
            times.setdefault(arrival.row, []).append(arrival.seconds)
        return [b - a for row in times.values() for a, b in pairwise(row)]

    @property
    def total(self) -> float:
        """Seconds to the last token."""
        return max(arrival.seconds for arrival in self.arrivals)

    @property
    def tokens(self) -> int:
        """Output tokens of all."""
        return sum(arrival.tokens for arrival in self.arrivals)

    @property
    def decode_rate(self) -> float:
        """Tokens a second while all decode; 0 if they never do."""
        try:
            return decode_rate(self.arrivals)
        except ValueError:
            return 0.0


class LoadedBroker(Broker):
    """A broker over a model that is loaded already."""

    given: LoadedModel

    def _load(self, progress: object) -> LoadedModel:
        return self.given


class Clients:
    """A broker in an event loop of its own, and agents there."""

    def __init__(self, portal: BlockingPortal, broker: Broker) -> None:
        self._portal = portal
        self.broker = broker

    def statistics(self) -> EngineStatistics:
        """What the engine holds now."""
        return self.call(self.broker.statistics).engine

    def run(self, jobs: Sequence[Job]) -> Outcome:
        """Let every job arrive in its time, and wait for all. Raises what one of them raised."""
        return self.call(self._run, jobs)

    def call(
        self, function: Callable[[Unpack[Given]], Awaitable[Result]], *given: *Given
    ) -> Result:
        """Run a function in the broker's event loop."""
        try:
            return self._portal.call(function, *given)
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    async def _run(self, jobs: Sequence[Job]) -> Outcome:
        recorder, arrivals, ends = self.broker.recorder, list[Arrival](), list[Completed]()
        came, start = recorder.now(), time.perf_counter()
        begun, all_begun, samples = set[int](), anyio.Event(), list[Sample]()

        async def agent(row: int, job: Job) -> None:
            await anyio.sleep(max(0.0, start + job.at - time.perf_counter()))
            request = Request(tokens=job.prompt, max_tokens=job.max_tokens)
            async with self.broker.stream(request) as stream:
                async for event in stream:
                    if isinstance(event, Delta) and event.tokens:
                        seconds = time.perf_counter() - start
                        arrivals.append(Arrival(row, seconds, len(event.tokens)))
                        begun.add(row)
                        if len(begun) == len(jobs):
                            all_begun.set()
                    elif isinstance(event, Completed):
                        ends.append(event)

        async def watch() -> None:
            await all_begun.wait()
            engine = (await self.broker.statistics()).engine
            samples.append(Sample(mx.get_active_memory(), engine))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            for row, job in enumerate(jobs):
                tasks.start_soon(agent, row, job)
        computed = sum(end.usage.prefilled_tokens for end in ends)
        events = [event for event in recorder.events() if event.time >= came]
        return Outcome(jobs, arrivals, computed, samples[0], events)


@contextmanager
def brokered(setup: Setup, *, max_rows: int) -> Iterator[Clients]:
    """A broker over the model, at its default policy but for the number of rows."""
    broker = LoadedBroker(setup.loaded.name, ram=setup.ram, max_rows=max_rows)
    broker.given = setup.loaded
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(broker),
    ):
        yield Clients(portal, broker)


def rows_that_fit(setup: Setup, jobs: Sequence[Job]) -> int:
    """How many of the jobs mlx-lm can decode at once in the bytes for copies; 0 for none."""
    longest = max(len(job.prompt) + job.max_tokens for job in jobs)
    return min(len(jobs), int(setup.copies / (MERGED_COPIES * setup.kv_bytes(longest))))


def run_replicated(setup: Setup, jobs: Sequence[Job], rows: int, cached: int = 0) -> Outcome:
    """The jobs through mlx-lm's batches, `rows` at a time; `cached` tokens of every prompt are
    computed before.
    """
    prefix = _prefix(setup, jobs[0].prompt[:cached]) if cached else None
    at_once = {"completion_batch_size": rows, "prefill_batch_size": min(rows, PREFILLED_AT_ONCE)}
    generator = BatchGenerator(setup.loaded.model, **at_once)
    row_of: dict[int, int] = {}
    arrivals, running, waiting = list[Arrival](), 0, list(enumerate(jobs))
    waiting.sort(key=lambda each: each[1].at)
    start, left = time.perf_counter(), len(jobs)
    while left:
        passed = time.perf_counter() - start
        while waiting and waiting[0][1].at <= passed:
            row, job = waiting.pop(0)
            caches = [copy.deepcopy(prefix)] if prefix else None
            names = generator.insert([job.prompt[cached:]], [job.max_tokens], caches)
            row_of[names[0]] = row
        if len(row_of) == len(jobs) - left:  # all that came are done
            time.sleep(max(0.0, start + waiting[0][1].at - time.perf_counter()))
            continue
        _, responses = generator.next()
        seconds = time.perf_counter() - start
        arrivals += [Arrival(row_of[response.uid], seconds) for response in responses]
        left -= sum(response.finish_reason is not None for response in responses)
        if not running and len({arrival.row for arrival in arrivals}) == len(jobs):
            running = mx.get_active_memory()
    generator.close()
    computed = sum(len(job.prompt) - cached for job in jobs)
    return Outcome(jobs, arrivals, computed, Sample(running))


def memory_of(outcome: Outcome, before: int, extents_before: int = 0) -> Memory:
    """What a run took above the bytes that were in use before it."""
    peak, running = mx.get_peak_memory() - before, outcome.running.active - before
    engine = outcome.running.engine
    if engine is None:
        return Memory(peak=peak, running=running)
    tails, ledger = engine.lane.batch.tails, engine.memory
    committed = {name: n for name, n in ledger.committed.items() if n}
    reserved = {f"{name}, promised": n for name, n in ledger.reserved.items() if n}
    return Memory(
        peak=peak,
        running=running,
        extents=ledger.committed["extents"] - extents_before,
        tails=tails.bytes,
        used_tails=tails.used_bytes,
        workspace=ledger.committed["workspace"] + ledger.reserved["workspace"],
        ledger=committed | reserved | {"peak": ledger.peak, "limit": ledger.limit},
    )


def spread(values: Sequence[float]) -> Spread:
    """Percentiles of some seconds."""
    p50, p95, p99 = (float(value) for value in np.percentile(values, (50, 95, 99)))
    return Spread(p50, p95, p99, max(values))


def median_by(outcomes: Sequence[Outcome], key: Callable[[Outcome], float]) -> int:
    """Which of some runs is the one in the middle."""
    order = sorted(range(len(outcomes)), key=lambda index: key(outcomes[index]))
    return order[statistics.median_low(range(len(order)))]


def _prefix(setup: Setup, tokens: Tokens) -> list[Any]:
    caches = setup.loaded.make_caches()
    for at in range(0, len(tokens), PREFILL_CHUNK):
        setup.loaded.model(mx.array([tokens[at : at + PREFILL_CHUNK]]), cache=caches)
        mx.eval([cache.state for cache in caches])
    return caches
