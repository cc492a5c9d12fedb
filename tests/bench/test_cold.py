"""`bench.cold`, with a model that takes no time."""

from pathlib import Path

import msgspec
import pytest

from bench import cold
from bench.cold_behind import DecodeSizes, DiskSizes
from bench.cold_findings import Line, Record, markdown
from bench.cold_gate import GateSizes
from bench.cold_index import IndexSizes
from bench.cold_rates import RateSizes
from mlx_swarm.broker.errors import InvalidSetting

MODEL = (
    "synthetic:llama?layers=2&hidden=64&heads=4&kv_heads=2&intermediate=64&vocab=4096&context=2048"
)
TINY = cold.Scale(
    model=MODEL,
    dtype="float32",
    rates=RateSizes(256, repeats=2),
    gate=GateSizes((64, 128), 32, repeats=1),
    decode=DecodeSizes(2, 32, 8, 2, written=64, writes=2, repeats=1),
    files=IndexSizes(120, lookups=10),
    disk=DiskSizes(5, 512, 16),
    small=MODEL,
    long_gate=GateSizes((96,), 32, repeats=1),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cold")


@pytest.fixture(scope="module")
def lines(folder: Path) -> list[Line]:
    """Every part, measured once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cold.PRESETS, "tiny", TINY)
        options = ["--preset", "tiny", "--folder", str(folder), "--json", str(folder / "records")]
        return cold.main(options)


def of(lines: list[Line], part: str) -> list[Line]:
    return [line for line in lines if line.part == part]


def test_every_line_is_recorded_and_nothing_else_is_left(lines: list[Line], folder: Path) -> None:
    (path,) = folder.iterdir()
    records = [msgspec.json.decode(row, type=Record) for row in path.read_bytes().splitlines()]
    assert [record.line for record in records] == lines
    assert {record.model for record in records} == {MODEL}


def test_rates_are_held_against_raw_io(lines: list[Line]) -> None:
    read, written = of(lines, "rates")
    for line in (read, written):
        assert line.comparison is not None
        assert line.comparison.figures[-1].contender.startswith("raw")
    assert [bar.least for bar in read.bars] == [True]


def test_the_gate_is_held_against_the_better_alternative(lines: list[Line]) -> None:
    found = of(lines, "gate")
    assert [line.setting.rpartition(", ")[2] for line in found] == [
        "64 tokens",
        "128 tokens",
        "96 tokens",
    ]
    for line in found:
        restored, computed = line.figures["restore s"], line.figures["prefill s"]
        assert isinstance(restored, float)
        assert isinstance(computed, float)
        chosen = restored if line.figures["gate"] == "restore" else computed
        assert line.bars[0].value == chosen / min(restored, computed)


def test_agents_share_their_prefix_on_disk(lines: list[Line]) -> None:
    (line,) = of(lines, "disk")
    assert line.figures["files"] == 6
    assert 1 <= float(line.figures["ratio"]) < 1.5
    assert float(line.figures["copies / ours"]) > 3


def test_the_rest_is_measured_too(lines: list[Line]) -> None:
    (decode,), (index,) = of(lines, "decode"), of(lines, "index")
    assert decode.bars[0].value > 0
    assert index.setting == "120 files"
    assert 0 < float(index.figures["look-up ms"]) <= float(index.figures["p99 ms"])


def test_a_table_has_all_lines(lines: list[Line]) -> None:
    page = markdown(lines)
    assert page.count("\n## ") == 5
    for line in lines:
        assert f"| {line.setting} |" in page


@pytest.mark.parametrize("arguments", [["stairs"], ["--preset", "fast"]])
def test_what_is_unknown_is_refused(arguments: list[str]) -> None:
    with pytest.raises(InvalidSetting, match="there are"):
        cold.main(arguments)
