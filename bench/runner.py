"""The runner of all benchmarks: contenders in turns, medians with their spread, ratios that hold.

A ratio between two contenders is only claimed if their spreads, the ranges between the quartiles,
do not overlap.
"""

import os
import platform
import statistics
import sys
import time
import tomllib
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from mlx_swarm.broker import backend
from mlx_swarm.broker.errors import SwarmError

Contender = Callable[[], float | None]
PROJECT = Path(__file__).parents[1] / "pyproject.toml"
DISTRIBUTIONS = ("mlx-swarm", "mlx", "mlx-lm")


class Figure(Struct, frozen=True, kw_only=True):
    """What one contender measured: the median, the quartiles around it, and all values in order."""

    contender: str
    median: float
    low: float
    high: float
    values: tuple[float, ...]


class Ratio(Struct, frozen=True, kw_only=True):
    """A contender's median over the baseline's, with the range that the two spreads allow."""

    contender: str
    baseline: str
    value: float
    low: float
    high: float
    verdict: Literal["better", "worse", "inconclusive"]


class Comparison(Struct, frozen=True, kw_only=True):
    """One thing measured of several contenders."""

    name: str
    unit: str
    figures: tuple[Figure, ...]
    ratios: tuple[Ratio, ...]


class Machine(Struct, frozen=True, kw_only=True):
    """Where the figures come from. `backend` is metal, cuda or cpu, with the BLAS of the latter."""

    backend: str
    device: str
    processor: str
    cores: int
    memory_bytes: int
    system: str
    python: str
    versions: dict[str, str]

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        gibibytes = self.memory_bytes / 2**30
        return (
            f"{self.backend} on {self.device}; {self.processor}, {self.cores} cores, "
            f"{gibibytes:.0f} GiB; {self.system}; Python {self.python}; {versions}"
        )


class Report(Struct, frozen=True, kw_only=True):
    """The outcome of a benchmark: its conditions and what it compared."""

    benchmark: str
    machine: Machine
    settings: dict[str, str | int | float | bool]
    comparisons: tuple[Comparison, ...] = ()

    def print(self, console: Console | None = None) -> None:
        """Show everything as tables."""
        console = console or Console()
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items() if value)
        console.print(f"[bold]{self.benchmark}[/] ({settings})", highlight=False)
        console.print(str(self.machine), highlight=False)
        for comparison in self.comparisons:
            console.print(table(comparison))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write everything as one JSON object."""
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")


def compare(
    name: str,
    contenders: Mapping[str, Contender],
    *,
    unit: str = "s",
    higher_is_better: bool = False,
    baseline: str | None = None,
    warmup: int = 1,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Run the contenders in turns, every other round backwards, and compare them with `baseline`.

    A contender returns its figure in `unit`, or None to be timed in seconds. The baseline is the
    last one unless named. Raises `ValueError` for a figure that is not positive, and for a choice
    of contenders or repeats that leaves nothing to compare.
    """
    names = list(contenders)
    baseline = baseline or (names[-1] if names else "")
    if len(names) < 2 or baseline not in contenders or repeats < 1:
        raise ValueError(f"nothing to compare: {names} with {baseline!r}, {repeats} repeats")
    values: dict[str, list[float]] = {contender: [] for contender in names}
    for turn in range(warmup + repeats):
        for contender in names if turn % 2 == 0 else reversed(names):
            value = _measure(contender, contenders[contender], clock)
            if turn >= warmup:
                values[contender].append(value)
    figures = {contender: _figure(contender, values[contender]) for contender in names}
    ratios = [
        _ratio(figure, figures[baseline], higher_is_better=higher_is_better)
        for contender, figure in figures.items()
        if contender != baseline
    ]
    return Comparison(name=name, unit=unit, figures=tuple(figures.values()), ratios=tuple(ratios))


def table(comparison: Comparison) -> Table:
    """A comparison as a table, to be printed while others are still measured."""
    shown = Table(title=comparison.name, title_justify="left")
    for heading in ("", f"median {comparison.unit}", "quartiles", "ratio", "range", "verdict"):
        shown.add_column(heading, justify="right" if heading else "left")
    ratios = {ratio.contender: ratio for ratio in comparison.ratios}
    for figure in comparison.figures:
        row = [figure.contender, f"{figure.median:.4g}", f"{figure.low:.4g} to {figure.high:.4g}"]
        if ratio := ratios.get(figure.contender):
            row += [f"{ratio.value:.3f}", f"{ratio.low:.3f} to {ratio.high:.3f}", ratio.verdict]
        else:
            row += ["1", "", "baseline"]
        shown.add_row(*row)
    return shown


def machine() -> Machine:
    """This machine, its backend and the versions that matter; imports MLX."""
    found = backend.describe()
    return Machine(
        backend=f"{found.device} ({found.blas} BLAS)" if found.blas else found.device,
        device=_device(found.device),
        processor=_processor(),
        cores=os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        versions={name: _version(name) for name in DISTRIBUTIONS},
    )


def positive(text: str) -> int:
    """A command-line number of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise ArgumentTypeError(f"{number} is less than 1")
    return number


def run(main: Callable[[], object]) -> None:
    """Run a benchmark as a command: what is refused or cannot be written is one line and exit 1."""
    try:
        main()
    except (SwarmError, OSError) as error:
        sys.exit(f"bench: {error}")


def _measure(name: str, contender: Contender, clock: Callable[[], float]) -> float:
    start = clock()
    value = contender()
    if value is None:
        value = clock() - start
    if not value > 0:
        raise ValueError(f"{name} measured {value}; a figure must be positive to be compared")
    return value


def _figure(contender: str, values: Sequence[float]) -> Figure:
    if len(values) == 1:
        low = median = high = values[0]
    else:
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Figure(contender=contender, median=median, low=low, high=high, values=tuple(values))


def _ratio(figure: Figure, baseline: Figure, *, higher_is_better: bool) -> Ratio:
    verdict: Literal["better", "worse", "inconclusive"] = "inconclusive"
    if figure.low > baseline.high:
        verdict = "better" if higher_is_better else "worse"
    elif figure.high < baseline.low:
        verdict = "worse" if higher_is_better else "better"
    return Ratio(
        contender=figure.contender,
        baseline=baseline.contender,
        value=figure.median / baseline.median,
        low=figure.low / baseline.high,
        high=figure.high / baseline.low,
        verdict=verdict,
    )


def _version(name: str) -> str:
    """Of an installed distribution, or of this project's sources if they are only on the path."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
    project = tomllib.loads(PROJECT.read_text("utf-8"))["project"]
    return str(project["version"]) if name == project["name"] else "not installed"


def _device(kind: str) -> str:
    """The name of what MLX computes on."""
    import mlx.core as mx

    if kind == "cpu":
        return "CPU"
    return str(mx.device_info().get("device_name", kind))


def _processor() -> str:
    """The processor's name, which Linux has in a file only."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
