"""The benchmark of sampling runs, on a model small enough to do it in seconds."""

from pathlib import Path

import msgspec

from bench.runner import Report
from bench.sampling import main
from tests.bench.tiny_swarm import TINY


def test_it_compares_steps_with_and_without_penalties_and_grammars(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    sizes = ["--rows", "3", "--steps", "2", "--repeats", "1"]
    report = main(["--model", TINY.model, "--dtype", "float32", "--json", str(path), *sizes])
    (comparison,) = report.comparisons
    assert [ratio.contender for ratio in comparison.ratios] == [
        "grammar in all rows",
        "grammar in one row",
        "penalties in all rows",
    ]
    assert {ratio.baseline for ratio in comparison.ratios} == {"none"}
    assert msgspec.json.decode(path.read_bytes(), type=Report) == report
