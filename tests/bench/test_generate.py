"""The benchmark of generation runs, on a model small enough to do it in seconds."""

from pathlib import Path

import msgspec
import pytest

from bench.generate import Prompts, main
from bench.runner import Report

SIZES = ["--prompt-tokens", "24", "--output-tokens", "12", "--rows", "3", "--repeats", "2"]


def test_it_compares_the_broker_with_mlx_lm_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    model = "synthetic:llama?layers=2&hidden=64&heads=2&context=1024"
    report = main(["--model", model, "--ram", "64MiB", "--json", str(path), *SIZES])
    names = [comparison.name for comparison in report.comparisons]
    assert names == [
        "prefill, 1 x 24",
        "decode, 1 row",
        "decode, 3 rows",
        "whole job, 3 x (24 + 12)",
    ]
    for comparison in report.comparisons:
        assert [figure.contender for figure in comparison.figures] == ["mlx-swarm", "mlx-lm"]
        assert comparison.ratios[0].baseline == "mlx-lm"
    assert msgspec.json.decode(path.read_bytes(), type=Report) == report
    assert "whole job" in capsys.readouterr().out


def test_both_sides_get_the_same_prompts_and_never_the_same_twice() -> None:
    ours, theirs = Prompts(1000, 8), Prompts(1000, 8)
    first, second = ours.take(3), ours.take(3)
    assert (first, second) == (theirs.take(3), theirs.take(3))
    assert len({tuple(prompt) for prompt in first + second}) == 6
    assert all(100 <= token < 900 for prompt in first for token in prompt)
