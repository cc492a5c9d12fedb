"""The simulated engine against the real one, turn by turn: what each prompt token came from."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from bench.simulate_costs import PROFILES
from bench.simulate_engine import SimulatedEngine, Sizes
from bench.simulate_rows import SimulatedRow
from bench.simulate_timeline import Timeline
from bench.swarm_setup import Setup, prepare
from mlx_swarm.broker import Completed, Request
from mlx_swarm.broker.cache.restores import CostGate
from mlx_swarm.broker.engine.preemption import SLICE
from tests.engine.driver import Box, Driver

TINY = "synthetic:llama?layers=2&hidden=64&heads=4&kv_heads=2&intermediate=64&context=2048&seed=3"
SHARED = [(7 * at) % 200 + 10 for at in range(300)]
ROWS, CHUNK, TURNS, ANSWER = 4, 64, 4, 6

Split = tuple[int, int, int]
"""Prompt tokens from RAM, from the cold tier, and computed."""


@pytest.fixture(scope="module")
def setup() -> Setup:
    return prepare(TINY, "float32", ram="1GiB", copies=0)


class Simulated:
    """The same interface for the simulator as `Real` has for the engine."""

    def __init__(
        self, ram_tokens: int, cold_tokens: int = 0, rows: int = ROWS, slice_tokens: int = SLICE
    ) -> None:
        costs = PROFILES["cpu-small"]
        unit = costs.bytes_per_token
        sizes = Sizes(
            ram_tokens * unit,
            cold=cold_tokens * unit,
            max_rows=rows,
            chunk=CHUNK,
            slice_tokens=slice_tokens,
        )
        self._timeline = Timeline()
        self._ended: dict[str, Split] = {}
        self.engine = SimulatedEngine(
            costs, sizes, self._timeline, lambda row, error: self._note(row, error)
        )

    def submit(self, name: str, prompt: list[int], answer: list[int], priority: int = 0) -> None:
        """Queue a prompt that is to be answered with these tokens."""
        agent = name.partition("/")[0]
        request = Request(max_tokens=len(answer), agent=agent, priority=priority)
        tokens = np.array(prompt, np.uint32), np.array(answer, np.uint32)
        self.engine.submit(SimulatedRow(name, request, *tokens, self._timeline.now))

    def turns(self, count: int = 1 << 30) -> None:
        """So many turns, or until nothing is left to do."""
        while count and (self.engine.turn() or self._timeline.skip(self.engine.next_change())):
            self._timeline.catch_up()
            self.engine.check_integrity()
            count -= 1

    def run(self, wave: list[tuple[str, list[int], list[int]]]) -> list[Split]:
        """Answer these prompts with these tokens."""
        for each in wave:
            self.submit(*each)
        return self.finish([name for name, _, _ in wave])

    def finish(self, names: list[str]) -> list[Split]:
        """Let all come to their end; what these cost."""
        self.turns()
        self.engine.check_idle()
        return [self._ended[name] for name in names]

    def _note(self, row: SimulatedRow, error: Exception | None) -> None:
        assert error is None
        assert row.output == row.answer
        self._ended[row.id] = row.ram_tokens, row.cold_tokens, row.computed


def real(driver: Driver, wave: list[tuple[str, list[int]]]) -> list[Completed]:
    """What the engine completes of these prompts."""
    boxes = [
        driver.submit(Request(tokens=prompt, max_tokens=ANSWER, agent=name.partition("/")[0]))
        for name, prompt in wave
    ]
    driver.run()
    driver.engine.flush(60)
    ends = [box.end for box in boxes]
    assert all(ends)
    return [end for end in ends if end is not None]


@pytest.mark.parametrize("is_cold", [False, True])
@pytest.mark.parametrize("ram_tokens", [700, 1200, 1 << 20])
def test_every_prompt_token_comes_from_where_it_really_does(
    setup: Setup,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ram_tokens: int,
    is_cold: bool,
) -> None:
    # Whether reading pays is a matter of times, which differ.
    monkeypatch.setattr(CostGate, "opens_for", lambda *_: True)
    random = np.random.default_rng(ram_tokens)
    ram, cold = setup.kv_bytes(ram_tokens), tmp_path if is_cold else None
    driver = Driver(setup.loaded, ram=ram, max_rows=ROWS, chunk=CHUNK, cold=cold)
    simulated = Simulated(ram_tokens, 1 << 20 if is_cold else 0)
    prompts = [[*SHARED[: 150 + 150 * (agent % 2)], 1 + agent] for agent in range(7)]
    found = np.zeros((2, 3), np.int64)
    for turn in range(TURNS):
        for prompt in prompts:
            prompt += random.integers(1, 250, int(random.integers(5, 60))).tolist()
        names = [f"agent-{agent}/{turn}" for agent in range(len(prompts))]
        ends = real(driver, list(zip(names, prompts, strict=True)))
        answers = [list(end.tokens) for end in ends]
        splits = simulated.run(list(zip(names, prompts, answers, strict=True)))
        for end, split in zip(ends, splits, strict=True):
            usage = end.usage
            assert sum(split) == usage.prompt_tokens
            found += (usage.ram_tokens, usage.cold_tokens, usage.prefilled_tokens), split
        for prompt, answer in zip(prompts, answers, strict=True):
            prompt += answer
    driver.check_idle()
    driver.engine.close()
    compared = slice(2 if is_cold else 0, 3)
    assert found[0].sum() == found[1].sum()
    assert (found[:, 1] > 0).all() or not (is_cold and ram_tokens == 700)
    assert is_cold or not found[:, 1].any()
    # A disk that is quicker or slower moves tokens from one tier to the other.
    assert (np.abs(found[0] - found[1]) <= 0.1 * found[0])[compared].all(), found


class Job(NamedTuple):
    """A request: prompt and answer in tokens, and turns until the next one comes."""

    priority: int
    prompt: int
    answer: int
    turns: int


@pytest.mark.parametrize(
    "jobs",
    [
        [Job(0, 200, 60, 9), Job(0, 90, 60, 9), Job(1, 150, 20, 9), Job(2, 80, 40, 9)],
        [Job(0, 300, 150, 3), Job(0, 200, 150, 3), Job(0, 60, 20, 3), Job(0, 60, 20, 3)],
        [Job(0, 300, 90, 2), Job(1, 200, 90, 20), Job(1, 60, 90, 20), Job(2, 99, 9, 20)],
    ],
    ids=["priorities", "slices", "both"],
)
@pytest.mark.parametrize("ram_tokens", [260, 1 << 20])
def test_rows_give_way_and_come_back_as_they_really_do(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, jobs: list[Job], ram_tokens: int
) -> None:
    rows, slice_tokens = 2, 96
    # How long things take, and with it who has waited for long, is to make no difference.
    ram = setup.kv_bytes(ram_tokens)
    driver = Driver(setup.loaded, ram=ram, max_rows=rows, chunk=CHUNK, clock=lambda: 0.0)
    monkeypatch.setattr(driver.engine.scheduler, "_slice", slice_tokens)
    random = np.random.default_rng(len(jobs))
    prompts = [random.integers(1, 250, job.prompt).tolist() for job in jobs]
    boxes: list[Box] = []
    for job, prompt in zip(jobs, prompts, strict=True):
        request = Request(tokens=prompt, max_tokens=job.answer, priority=job.priority)
        boxes.append(driver.submit(request))
        driver.run(job.turns)
    driver.run()
    ends = [box.end for box in boxes if box.end is not None]
    simulated = Simulated(ram_tokens, rows=rows, slice_tokens=slice_tokens)
    for number, (job, prompt, end) in enumerate(zip(jobs, prompts, ends, strict=True)):
        simulated.submit(f"/{number}", prompt, list(end.tokens), job.priority)
        simulated.turns(job.turns)
    splits = simulated.finish([f"/{number}" for number in range(len(jobs))])
    driver.check_idle()
    usages = [end.usage for end in ends]
    assert splits == [(u.ram_tokens, u.cold_tokens, u.prefilled_tokens) for u in usages]
    real, ours = driver.engine.statistics(), simulated.engine
    assert ours.scheduler.statistics().preempted == real.requests.preempted > 0
    assert ours.usage.recomputed_tokens == real.usage.recomputed_tokens
    assert (real.usage.recomputed_tokens > 0) == (ram_tokens == 260)
    driver.engine.close()


@pytest.mark.parametrize("ram_tokens", [700, 1500])
def test_sessions_beyond_memory_take_turns_as_they_really_do(setup: Setup, ram_tokens: int) -> None:
    driver = Driver(setup.loaded, ram=setup.kv_bytes(ram_tokens), max_rows=2, chunk=CHUNK)
    simulated = Simulated(ram_tokens, rows=2)
    random = np.random.default_rng(ram_tokens)
    prompts: list[list[int]] = [[] for _ in range(8)]
    found = np.zeros((2, 3), np.int64)
    for turn in range(TURNS):
        for prompt in prompts:
            prompt += random.integers(1, 250, 70).tolist()
        names = [f"agent-{agent}/{turn}" for agent in range(len(prompts))]
        ends = real(driver, list(zip(names, prompts, strict=True)))
        answers = [list(end.tokens) for end in ends]
        for usage, split in zip(
            (end.usage for end in ends),
            simulated.run(list(zip(names, prompts, answers, strict=True))),
            strict=True,
        ):
            found += (usage.ram_tokens, usage.cold_tokens, usage.prefilled_tokens), split
        for prompt, answer in zip(prompts, answers, strict=True):
            prompt += answer
    displaced = simulated.engine.sessions.statistics().replaced
    assert displaced > 0
    assert driver.engine.sessions.statistics().replaced > 0
    assert simulated.engine.recorder.counts["Displaced"] == displaced
    assert simulated.engine.recorder.counts["Deferred"] > 0
    driver.check_idle()
    driver.engine.close()
    assert (np.abs(found[0] - found[1]) <= 0.1 * found[0]).all(), found
