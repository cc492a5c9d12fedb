"""`bench.load`, with a model that takes no time: findings, files, tables, refusals."""

from pathlib import Path

import pytest

from bench import load
from bench.load_findings import LoadRecord, Sessions
from bench.load_presets import PARTS, PRESETS, LoadScale
from bench.load_sessions import EVERYBODY, POLICIES, SessionSizes
from bench.sampling import Sizes
from bench.swarm_records import read_as
from mlx_swarm.broker.errors import SwarmError
from tests.bench.tiny_swarm import TINY

SCALE = LoadScale(
    model=TINY.model,
    dtype="float32",
    seconds=dict.fromkeys(PARTS, 3),
    sessions=SessionSizes(9, 3, 16, 48, 4, rows=2, think=0.01, repeats=1),
    gap=TINY.gap,
    grammar=Sizes(rows=2, steps=2, repeats=1),
    ram=TINY.ram,
)


def test_sessions_by_working_set_compute_less_than_everybody_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PRESETS, "tiny", SCALE)
    path = tmp_path / "load.jsonl"
    load.main(["sessions", "--preset", "tiny", "--json", str(path)])
    (record,) = read_as(LoadRecord, [path])
    found = record.found
    assert isinstance(found, Sessions)
    # Random tokens of few may be the same at a place where prompts part.
    assert found.distinct <= 16 + 9 * 3 * (48 + 4) - 9 * 4 <= found.distinct + 9
    policies = {each.name: each for each in found.policies}
    assert tuple(policies) == POLICIES
    least = found.distinct
    assert all(each.prefilled >= least for each in policies.values())
    assert policies["by working set, with hints"].prefilled < policies[EVERYBODY].prefilled
    assert policies[EVERYBODY].replaced == 0
    load.main(["table", str(path), str(path)])
    page = capsys.readouterr().out
    assert "## Sessions beyond memory" in page
    for block in page.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1


@pytest.mark.parametrize(
    ("part", "title"),
    [("gap", "a long prompt prefills"), ("grammar", "Grammars and penalties in a batch")],
)
def test_every_part_prints_a_line_and_a_table(
    part: str,
    title: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(PRESETS, "tiny", SCALE)
    path = tmp_path / "load.jsonl"
    load.main([part, "--preset", "tiny", "--json", str(path)])
    assert capsys.readouterr().out
    load.main(["table", str(path)])
    assert title in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--preset", "fast"], "'fast' is no preset; there are cpu, gpu"),
        (["stairs"], "'stairs' is no part; there are sessions, gap, grammar"),
        (["table"], "table needs the files"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(arguments: list[str], reason: str) -> None:
    with pytest.raises(SwarmError, match=reason):
        load.main(arguments)


def test_every_preset_knows_its_parts_and_their_time() -> None:
    for scale in PRESETS.values():
        assert set(scale.seconds) == set(PARTS)
        assert sum(scale.seconds.values()) < 600
