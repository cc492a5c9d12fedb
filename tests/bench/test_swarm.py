"""`bench.swarm`, with a model that takes no time: findings, files, tables, refusals."""

from pathlib import Path
from typing import TypeVar

import pytest

from bench import swarm
from bench.swarm_findings import (
    STOCK,
    Accuracy,
    Arrival,
    Clones,
    Found,
    Gap,
    Load,
    Overhead,
    Sharing,
    Steps,
)
from bench.swarm_presets import PARTS, PRESETS
from bench.swarm_records import Record, read
from mlx_swarm.broker.errors import SwarmError
from tests.bench.tiny_swarm import ALL, TINY

Kind = TypeVar("Kind", bound=Found)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every part, measured once, in two calls that write to one file."""
    path = tmp_path_factory.mktemp("swarm") / "records.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny", ALL)
        first, *others = PARTS
        for parts in ([first, "--rows", "1", "3"], others):
            swarm.main([*parts, "--preset", "tiny", "--json", str(path)])
    return path


@pytest.fixture(scope="module")
def records(target: Path) -> list[Record]:
    return read([target])


def of(records: list[Record], kind: type[Kind]) -> list[Kind]:
    return [record.found for record in records if isinstance(record.found, kind)]


def test_every_record_names_its_conditions(records: list[Record]) -> None:
    for record in records:
        assert (record.model, record.dtype) == (TINY.model, "float32")
        assert record.attention
        assert record.machine.backend


def test_the_attention_that_serves_is_as_accurate_as_stock(records: list[Record]) -> None:
    (found,) = of(records, Accuracy)
    assert found.deviations == (1, 4, 8, 16)
    assert all(bar.met for bar in found.bars())


def test_steps_of_a_number_of_rows_are_over_the_same_stock_steps(records: list[Record]) -> None:
    one, three = of(records, Steps)
    assert [figure.contender for figure in one.comparison.figures] == [
        "shared, 0 shared",
        "shared, 64 shared",
        STOCK,
    ]
    assert three.figure("mlx-lm", 64)
    assert not three.figure("mlx-lm", 0)
    assert {ratio.baseline for ratio in three.comparison.ratios} == {STOCK}


def test_an_arrival_computes_every_prompt_token_once(records: list[Record]) -> None:
    found = {(each.system, each.variant): each for each in of(records, Arrival)}
    variants = ["first use", "cold", "prefix cached"]
    assert list(found) == [("mlx-swarm", variant) for variant in variants] + [
        ("mlx-lm", variant) for variant in variants[1:]
    ]
    cold, cached = found["mlx-swarm", "cold"], found["mlx-swarm", "prefix cached"]
    assert cold.computed == cold.distinct == 64 + 3 * 8
    assert cached.computed == cached.distinct == 3 * 8
    assert cold.bar_seconds == pytest.approx(88 / cold.prefill_rate)
    assert found["mlx-lm", "cold"].computed == 3 * (64 + 8)
    assert 0 < cold.first <= cold.median <= cold.last <= cold.total
    assert cold.shares
    assert cold.shares.chunks > 0
    assert cold.shares.prefill + cold.shares.decode + cold.shares.rest < cold.total
    memory = cold.memory
    assert memory.peak >= memory.running >= memory.tails >= memory.used_tails > 0
    assert memory.ledger["weights"] > 0


def test_a_load_is_the_same_for_both_systems(records: list[Record]) -> None:
    ours, theirs = of(records, Load)
    assert ours.prompt_tokens == theirs.prompt_tokens == theirs.computed
    assert ours.generated == theirs.generated
    assert ours.distinct <= ours.computed < ours.prompt_tokens
    for spread in (ours.first_tokens, ours.gaps, theirs.first_tokens, theirs.gaps):
        assert 0 < spread.p50 <= spread.p95 <= spread.p99 <= spread.worst


def test_the_broker_is_held_against_a_bare_loop(records: list[Record]) -> None:
    (found,) = of(records, Overhead)
    assert [figure.contender for figure in found.comparison.figures] == ["broker", "bare loop"]


def test_gaps_are_of_agents_that_ran_meanwhile(records: list[Record]) -> None:
    (found,) = of(records, Gap)
    for values in (found.steps, found.gaps, found.prefill_seconds):
        assert len(values) == 1
        assert values[0] > 0


def test_running_clones_hold_one_prefix(records: list[Record]) -> None:
    (found,) = of(records, Clones)
    assert found.prefix_copy <= found.prefix <= 1.05 * found.prefix_copy
    assert found.memory.tails >= found.memory.used_tails > 0


def test_sharing_is_held_against_copies(records: list[Record]) -> None:
    cells = [(each.rows, each.groups, each.span) for each in of(records, Sharing)]
    assert cells == [(1, 1, 16), (1, 1, 64), (3, 1, 16), (3, 1, 64), (4, 2, 32)]


def test_a_table_is_written_of_all_files(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swarm.main(["table", str(target), str(target)])
    page = capsys.readouterr().out
    titles = [line for line in page.splitlines() if line.startswith("## ")]
    assert len(titles) == 9
    assert titles[-1] == "## Bars"
    assert page.count("throughput over a bare loop, 3 rows") == 2
    assert "Sharing one span pays from these rows on. 16 tokens" in page
    # Every row of a table has as many cells as its head.
    for block in page.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1


def test_a_part_says_how_long_it_takes_and_what_it_finds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PRESETS, "tiny", ALL)
    swarm.main(["memory", "--preset", "tiny", "--replicate", "1"])
    printed = capsys.readouterr()
    assert "about 0.1 minutes" in printed.err
    assert "3 clones, prefix at rest over one copy: 1.0" in printed.out


def test_mlx_lm_stays_out_where_it_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(PRESETS, "tiny", ALL)
    path = tmp_path / "records.jsonl"
    arguments = ["replicated-arrival", "load", "--preset", "tiny", "--replicate", "1"]
    swarm.main([*arguments, "--rate", "50", "--json", str(path)])
    (found,) = of(read([path]), Load)
    assert (found.system, found.arrivals_a_second) == ("mlx-swarm", 50.0)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--preset", "fast"], "'fast' is no preset; there are cpu, gpu-steps"),
        (["stairs"], "'stairs' is no part; there are steps, arrival"),
        (["load", "--rate", "-1"], r"a rate of -1\.0 arrivals a second"),
        (["load", "--rate", "nan"], "a rate of nan arrivals a second"),
        (["load", "--seed", "-1"], "a seed of -1"),
        (["table"], "table needs the files"),
        (["memory", "--model", "synthetic:mamba2?layers=2"], "mamba2.* has 0 of 2 layers"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(arguments: list[str], reason: str) -> None:
    with pytest.raises(SwarmError, match=reason) as refused:
        swarm.main(arguments)
    assert "\n" not in str(refused.value)


def test_every_preset_knows_its_parts_and_their_time() -> None:
    for preset in PRESETS.values():
        assert set(preset.parts) <= set(PARTS)
        assert set(preset.scale.seconds) == set(PARTS)
        assert sum(preset.scale.seconds[part] for part in preset.parts) < 600
