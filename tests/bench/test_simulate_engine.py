"""The simulated engine against the real one, turn by turn: what each prompt token came from."""

import math
from pathlib import Path

import numpy as np
import pytest

from bench.simulate_costs import PROFILES
from bench.simulate_engine import SimulatedEngine, Sizes
from bench.simulate_rows import SimulatedRow
from bench.simulate_timeline import Timeline
from bench.swarm_setup import Setup, prepare
from mlx_swarm.broker import Completed, Request
from mlx_swarm.broker.cache.restores import CostGate
from tests.engine.driver import Driver

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

    def __init__(self, ram_tokens: int, cold_tokens: int) -> None:
        costs = PROFILES["cpu-small"]
        unit = costs.bytes_per_token
        self._timeline = Timeline()
        self._ended: dict[str, Split] = {}
        self.engine = SimulatedEngine(
            costs,
            Sizes(ram_tokens * unit, cold=cold_tokens * unit, max_rows=ROWS, chunk=CHUNK),
            self._timeline,
            lambda row, error: self._note(row, error),
        )

    def run(self, wave: list[tuple[str, list[int], list[int]]]) -> list[Split]:
        """Answer these prompts with these tokens."""
        for name, prompt, answer in wave:
            request = Request(max_tokens=len(answer), agent=name.partition("/")[0])
            tokens = np.array(prompt, np.uint32), np.array(answer, np.uint32)
            self.engine.submit(SimulatedRow(name, request, *tokens, self._timeline.now))
        while self.engine.turn() or self._timeline.skip(math.inf):
            self._timeline.catch_up()
            self.engine.check_integrity()
        self.engine.check_idle()
        return [self._ended[name] for name, _, _ in wave]

    def _note(self, row: SimulatedRow, error: Exception | None) -> None:
        assert error is None
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
    monkeypatch.setattr(CostGate, "opens_for", lambda gate, size, gained: True)
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
    assert (found[:, 1] > 0).all() == (found[:, 1] > 0).any() == (is_cold and ram_tokens == 700)
    # A disk that is quicker or slower moves tokens from one tier to the other.
    assert (np.abs(found[0] - found[1]) <= 0.1 * found[0])[compared].all(), found
