"""`bench.simulate`: the command, its workloads, its costs, and the tier below."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import simulate
from bench.simulate_calibrate import CalibrateSizes, calibrate, fit
from bench.simulate_check import Checked, check
from bench.simulate_costs import PROFILES, Costs, named
from bench.simulate_engine import Sizes
from bench.simulate_findings import Record, Simulated, times
from bench.simulate_presets import checks
from bench.simulate_run import play
from bench.simulate_timeline import Timeline
from bench.simulate_workload import SwarmSizes, swarm, trace
from bench.swarm_setup import prepare
from mlx_swarm.broker.errors import SwarmError
from tests.bench.tiny_swarm import TINY

SMALL = ["--agents", "12", "--turns", "3", "--ram", "4MiB", "--rate", "20", "--pause", "0.5"]


def simulated(*arguments: str) -> Simulated:
    (record,) = simulate.main(list(arguments))
    assert isinstance(record.found, Simulated)
    return record.found


@pytest.mark.parametrize(
    "workload",
    [
        ["swarm", *SMALL, "--cold", "1GiB", "--tenants", "2", "--urgent", "3"],
        ["sessions", *SMALL, "--times", "2", "--profile", "cpu-small"],
    ],
)
def test_a_seed_gives_the_same_figures_and_another_one_others(workload: list[str]) -> None:
    first, again = (simulated(*workload, "--seed", "5") for _ in range(2))
    assert first == again
    other = simulated(*workload, "--seed", "6")
    assert other.ram_tokens != first.ram_tokens
    assert not first.failed
    assert first.turns == 12 * 3
    assert first.first_tokens is not None
    assert 0 < first.first_tokens.p50 <= first.first_tokens.p99 <= first.first_tokens.worst
    assert first.counts["evictions"] > 0


def test_a_record_says_everything_and_can_be_read_again(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    made = simulate.main(["swarm", *SMALL, "--cold", "1GiB", "--json", str(path)])
    (line,) = path.read_bytes().splitlines()
    (record,) = made
    assert msgspec.json.decode(line, type=Record) == record
    found = record.found
    assert isinstance(found, Simulated)
    assert found.cold_tokens > 0
    assert found.bytes_read >= found.cold_tokens * record.costs.bytes_per_token
    assert found.samples
    assert max(sample.cold for sample in found.samples) <= found.peak_cold <= found.bytes_written
    assert {"agents", "tenants"} == found.fairness.keys()
    assert all(0 < each.jain <= 1 for each in found.fairness.values())


def test_thousands_of_agents_finish() -> None:
    sizes = SwarmSizes(2000, sets=2, turns=1, instructions=(60, 90), ask=(4, 9), answer=(1, 3))
    costs = PROFILES["h200-8b"]
    outcome = play(swarm(1, sizes), costs, Sizes(ram=1 << 30, max_rows=64))
    outcome.engine.check_idle()
    assert len(outcome.turns) == 2000
    assert all(not turn.error for turn in outcome.turns)
    # Most have to wait outside of the queue, and none of them gives up.
    assert max(sample.waiting for sample in outcome.samples) > 1024


def test_a_trace_shares_what_its_blocks_share(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [7, 8]},
        {"timestamp": 9000, "input_length": 1400, "output_length": 0, "hash_ids": [7, 8, 9]},
        {"timestamp": 18000, "input_length": 600, "output_length": 3, "hash_ids": [7, 10]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    found = simulated("trace", str(path), "--ram", "1GiB", "--speed", "2")
    assert found.prompt_tokens == 3000
    # A prompt's partial last block is stored as far as it goes.
    assert found.ram_tokens == 1000 + 512
    assert 9.0 < found.seconds < 12.0
    assert len(list(trace(path, count=2))) == 2


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["swarm", "--profile", "abacus"], "'abacus' is no profile; there are cpu-small, h200-8b"),
        (["swarm", "--costs", __file__], "holds no costs"),
        (["sessions", "--agents", "9", "--ram", "1MiB"], "have no room for 4 answers"),
        (["trace", __file__, "--speed", "0"], r"a speed of 0\.0"),
        (["check", "--model", TINY.model], r"the costs are for 2,048 bytes a token; .* has 512"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(arguments: list[str], reason: str) -> None:
    with pytest.raises(SwarmError, match=reason):
        simulate.main(arguments)


@given(
    st.lists(st.floats(0.001, 1), min_size=2, max_size=2),
    st.lists(st.tuples(st.integers(1, 99), st.integers(1, 99)), min_size=8, max_size=8),
)
def test_a_fit_finds_the_factors(factors: list[float], sizes: list[tuple[int, int]]) -> None:
    equations = [((1.0, a, a * b), 0.5 + factors[0] * a + factors[1] * a * b) for a, b in sizes]
    found = fit(equations)
    assert all(each >= 0 for each in found)
    for parts, seconds in equations:
        estimate = sum(a * b for a, b in zip(parts, found, strict=True))
        assert estimate == pytest.approx(seconds, rel=1e-3)


def test_what_would_be_negative_is_left_out() -> None:
    found = fit([((1.0, n), 10.0 - n) for n in range(5)])
    assert found[0] > 0
    assert found[1] == 0.0


def test_costs_are_measured_and_a_real_broker_agrees(tmp_path: Path) -> None:
    setup = prepare(TINY.model, TINY.dtype, ram="1GiB", copies=0)
    sizes = CalibrateSizes(
        (16, 32), (0, 64), (1, 2), (0, 32), (8,), generated=12, stored=128, repeats=1
    )
    costs = calibrate(setup, sizes, tmp_path)
    assert costs.bytes_per_token == setup.layout.bytes_per_token
    path = tmp_path / "costs.json"
    path.write_bytes(msgspec.json.encode(costs))
    assert named("", path) == costs == msgspec.json.decode(path.read_bytes(), type=Costs)
    cases = checks(costs.bytes_per_token, int(setup.loaded.config["vocab_size"]), agents=4)
    assert all(case.sizes.ram for case in cases)
    found = check("tiny", setup, costs, *cases[1][1:])
    assert isinstance(found, Checked)
    assert found.real.prompt == found.simulated.prompt
    assert list(found.bars())


def test_percentiles_count_every_row() -> None:
    found = times([1.0, 2.0, 3.0], [98, 1, 1])
    assert found is not None
    assert (found.p50, found.p90, found.worst) == (1.0, 1.0, 3.0)
    assert times([]) is None


def test_time_passes_in_order() -> None:
    timeline, seen = Timeline(), list[str]()
    timeline.at(2.0, lambda: seen.append("late"))
    timeline.at(1.0, lambda: seen.append("early"))
    timeline.at(1.0, lambda: timeline.at(1.5, lambda: seen.append("between")))
    assert timeline.skip(float("inf"))
    assert timeline.now == 1.0
    timeline.spend(1.0)
    timeline.catch_up()
    assert seen == ["early", "between", "late"]
    assert not timeline.skip(float("inf"))
    assert timeline.skip(5.0)
    assert timeline.now == 5.0
    assert np.isclose(timeline(), 5.0)
