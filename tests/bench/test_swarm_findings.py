"""Bars: which figure has to reach what, and whether it does."""

from pathlib import Path

import pytest

from bench.runner import compare, machine
from bench.swarm_findings import (
    STOCK,
    Arrival,
    Bar,
    Clones,
    Gap,
    Memory,
    Overhead,
    Steps,
    step_name,
)
from bench.swarm_records import Record, ResultsUnreadable, append, read


def steps(rows: int, **milliseconds: float) -> Steps:
    contenders = {step_name(way.replace("_", "-"), 8192): ms for way, ms in milliseconds.items()}
    contenders[STOCK] = 10.0
    compared = compare("step", {n: lambda ms=ms: ms for n, ms in contenders.items()}, repeats=1)  # type: ignore[misc]
    return Steps(rows=rows, tail=1, prefixes=(0, 8192), comparison=compared)


def arrival(system: str = "mlx-swarm", variant: str = "cold", last: float = 1.0) -> Arrival:
    return Arrival(
        system=system,
        variant=variant,
        agents=2,
        shared=8,
        own=4,
        generated=6,
        first=0.5,
        median=0.5,
        last=last,
        total=3.0,
        decode_rate=0.0,
        computed=16,
        distinct=16,
        prefill_rate=16.0,
        bar_seconds=1.0,
        memory=Memory(peak=0, running=0),
    )


def test_a_bar_is_a_most_or_a_least() -> None:
    assert str(Bar("x", 1.1, 1.1)) == "x: 1.100 (at most 1.1): met"
    assert str(Bar("x", 1.2, 1.1)) == "x: 1.200 (at most 1.1): MISSED"
    assert str(Bar("x", 0.98, 0.97, True)) == "x: 0.980 (at least 0.97): met"
    assert not Bar("x", 0.96, 0.97, True).met
    assert not Bar("x", float("nan"), 1.0).met


def test_steps_are_held_to_the_bars_of_their_cell() -> None:
    found = list(steps(64, shared=11.5, plain=20.0, mlx_lm=184.0).bars())
    assert [bar.value for bar in found] == pytest.approx([1.15, 2.0, 16.0])
    assert [(bar.limit, bar.met) for bar in found] == [(1.1, False), (2.5, True), (15.0, True)]
    assert not list(steps(32, shared=11.5).bars())


def test_only_our_cold_arrival_has_a_bar() -> None:
    last, once = arrival(last=1.4).bars()
    assert (last.value, last.met) == (1.4, False)
    assert (once.value, once.met) == (1.0, True)
    assert not [*arrival(variant="first use").bars(), *arrival("mlx-lm").bars()]
    assert arrival().rate == 4.0


def test_clones_may_hold_little_more_than_one_prefix() -> None:
    memory = Memory(peak=900, running=700, extents=230, tails=240, used_tails=200, workspace=100)
    found = Clones(
        agents=4, shared=8, own=2, prefix_copy=100, own_copy=200, at_rest=100, memory=memory
    )
    prefix, tails, workspace = found.bars()
    assert (prefix.value, prefix.met) == (1.3, False)
    assert (tails.value, tails.met) == (1.2, True)
    assert (workspace.value, workspace.met) == (1.0, True)
    assert memory.transients == 130


def gap() -> Gap:
    return Gap(
        agents=8,
        prompt=16,
        steps=(10.0, 10.0),
        gaps=(30.0, 50.0),
        prefill_seconds=(1.0, 1.0),
    )


def test_the_worst_gap_counts() -> None:
    (bar,) = gap().bars()
    assert (bar.value, bar.met) == (5.0, False)


def test_throughput_is_held_against_the_bare_loop() -> None:
    compared = compare("x", {"broker": lambda: 98.0, "bare loop": lambda: 100.0}, repeats=1)
    found = Overhead(rows=2, shared=8, own=4, generated=6, comparison=compared)
    (bar,) = found.bars()
    assert (bar.value, bar.met) == (0.98, True)


def record(found: Gap | Arrival) -> Record:
    return Record(
        date="2030-01-02", machine=machine(), model="m", dtype="float32", attention="a", found=found
    )


def test_a_prefill_is_held_to_its_bar_on_a_gpu_only() -> None:
    on_cpu = record(gap())
    assert not list(on_cpu.bars()) or on_cpu.machine.backend.startswith("cuda")
    assert list(record(arrival()).bars())


def test_records_add_up_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    for found in (gap(), arrival()):
        append(path, record(found))
    assert read([path, path]) == [record(gap()), record(arrival())] * 2


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    append(path, record(gap()))
    with path.open("a") as file:
        file.write('{"date": 3}\n')
    with pytest.raises(ResultsUnreadable, match=r"records\.jsonl, line 2: "):
        read([path])
