"""The benchmark runner: turns, medians, the spread rule, and reports that name their conditions."""

import io
from collections.abc import Callable
from importlib import metadata
from itertools import cycle
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from bench import runner
from bench.runner import Comparison, Contender, Report, compare, machine


class FakeClock:
    """A clock that moves only when something takes time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def taking(self, *seconds: float) -> Contender:
        durations = cycle(seconds)

        def contender() -> None:
            self.now += next(durations)

        return contender


def figures(*values: float) -> Callable[[], float]:
    return cycle(values).__next__


def test_contenders_take_turns_and_every_other_round_runs_backwards() -> None:
    order: list[str] = []

    def named(name: str) -> Callable[[], float]:
        return lambda: order.append(name) or 1.0  # type: ignore[func-returns-value]

    compare("x", {name: named(name) for name in "abc"}, warmup=1, repeats=2)
    assert "".join(order) == "abccbaabc"


def test_what_returns_nothing_is_timed() -> None:
    clock = FakeClock()
    contenders = {"a": clock.taking(2.0), "b": clock.taking(4.0)}
    comparison = compare("x", contenders, repeats=3, clock=clock)
    assert [figure.median for figure in comparison.figures] == [2.0, 4.0]
    assert (comparison.unit, comparison.ratios[0].value) == ("s", 0.5)


def test_warm_up_rounds_are_not_counted() -> None:
    clock = FakeClock()
    contenders = {"a": clock.taking(100.0, 90.0, 1.0, 1.0), "b": clock.taking(1.0)}
    comparison = compare("x", contenders, warmup=2, repeats=2, clock=clock)
    assert comparison.figures[0].values == (1.0, 1.0)


def test_medians_and_quartiles_ignore_one_outlier() -> None:
    comparison = compare(
        "x", {"a": figures(1.0, 2.0, 3.0, 4.0, 100.0), "b": figures(1.0)}, warmup=0, repeats=5
    )
    figure = comparison.figures[0]
    assert (figure.low, figure.median, figure.high) == (2.0, 3.0, 4.0)


@pytest.mark.parametrize(
    ("values", "higher_is_better", "verdict"),
    [
        ((8.0, 9.0, 9.5), True, "worse"),
        ((8.0, 9.0, 9.5), False, "better"),
        ((11.0, 12.0, 13.0), True, "better"),
        ((11.0, 12.0, 13.0), False, "worse"),
        ((9.0, 12.0, 13.0), True, "inconclusive"),
        ((10.0, 10.0, 10.0), True, "inconclusive"),
    ],
)
def test_a_ratio_is_claimed_only_if_the_spreads_are_apart(
    values: tuple[float, ...], higher_is_better: bool, verdict: str
) -> None:
    contenders = {"new": figures(*values), "old": figures(10.0, 10.0, 11.0)}
    comparison = compare("x", contenders, warmup=0, repeats=3, higher_is_better=higher_is_better)
    (ratio,) = comparison.ratios
    assert (ratio.contender, ratio.baseline, ratio.verdict) == ("new", "old", verdict)
    assert ratio.low <= ratio.value <= ratio.high


def test_any_contender_can_be_the_baseline() -> None:
    contenders = {"a": figures(1.0), "b": figures(2.0), "c": figures(4.0)}
    comparison = compare("x", contenders, baseline="b", repeats=1)
    assert [(ratio.contender, ratio.value) for ratio in comparison.ratios] == [
        ("a", 0.5),
        ("c", 2.0),
    ]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_figure_that_has_no_ratio_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"a measured .* must be positive"):
        compare("x", {"a": figures(value), "b": figures(1.0)})


@pytest.mark.parametrize(
    ("names", "baseline", "repeats"),
    [("", None, 5), ("a", None, 5), ("ab", "c", 5), ("ab", "a", 0)],
)
def test_nothing_to_compare_is_refused(names: str, baseline: str | None, repeats: int) -> None:
    with pytest.raises(ValueError, match="nothing to compare"):
        compare("x", {name: figures(1.0) for name in names}, baseline=baseline, repeats=repeats)


@pytest.fixture(scope="module")
def report() -> Report:
    comparison = compare(
        "decode", {"new": figures(2.0), "old": figures(1.0)}, unit="tok/s", higher_is_better=True
    )
    return Report(
        benchmark="example", machine=machine(), settings={"rows": 8}, comparisons=(comparison,)
    )


def test_a_report_prints_its_conditions_and_its_ratios(report: Report) -> None:
    console = Console(file=io.StringIO(), width=200)
    report.print(console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    for expected in ("rows 8", report.machine.backend, "mlx-lm 0.", "2.000", "better", "tok/s"):
        assert expected in printed


def test_a_report_is_written_as_one_json_object(report: Report, tmp_path: Path) -> None:
    report.write(tmp_path / "report.json")
    assert msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=Report) == report


def test_the_machine_names_backend_and_versions() -> None:
    found = machine()
    assert found.backend.split()[0] in ("cpu", "cuda", "metal")
    assert set(found.versions) == {"mlx-swarm", "mlx", "mlx-lm"}
    assert found.cores >= 1


def test_a_comparison_keeps_every_value() -> None:
    comparison: Comparison = compare(
        "x", {"a": figures(1.0, 2.0), "b": figures(3.0)}, warmup=0, repeats=4
    )
    assert comparison.figures[0].values == (1.0, 2.0, 1.0, 2.0)


def test_sources_on_the_path_have_a_version_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_nothing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    expected = metadata.version("mlx-swarm")
    monkeypatch.setattr(metadata, "version", of_nothing)
    assert runner._version("mlx-swarm") == expected
    assert runner._version("mlx") == "not installed"
