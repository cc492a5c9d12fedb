"""The swarm benchmark, with a model that takes no time: what it writes, and that sharing shows."""

import sys
from pathlib import Path

import msgspec
import pytest

from bench import swarm

MODEL = "synthetic:llama?layers=2&hidden=64&heads=4&kv_heads=2&intermediate=64&context=1024"


def test_steps_and_swarms_are_measured_beside_mlx_lm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "swarm.json"
    arguments = ["--model", MODEL, "--steps", "3x64", "--swarms", "3x64x8x6", "--count", "2"]
    arguments += ["--repeats", "1", "--tail", "8", "--json", str(target)]
    monkeypatch.setattr(sys, "argv", ["swarm", *arguments])
    swarm.main()
    results = msgspec.json.decode(target.read_bytes(), type=swarm.Results)
    (steps,) = results.report.comparisons
    assert [figure.contender for figure in steps.figures] == [
        "shared",
        "mlx-lm",
        "stock without the prefix",
    ]
    ours, theirs = results.swarms
    assert (ours.system, theirs.system) == ("mlx-swarm", "mlx-lm")
    # The last prompt token of each agent is left to its first decode step.
    assert ours.prefilled == 64 + 3 * 8
    assert theirs.prefilled == 3 * (64 + 8)
    assert 0 < ours.first <= ours.median <= ours.last <= ours.total
    assert ours.peak_bytes > ours.prefix_bytes
