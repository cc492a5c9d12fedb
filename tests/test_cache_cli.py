"""`mlx-swarm cache`: what it prints, and that it touches nothing but what it is told to."""

import os
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from mlx_swarm.broker import cli
from mlx_swarm.broker.cache.ssd import SsdStore
from mlx_swarm.broker.cache.ssd.disk import Disk
from mlx_swarm.broker.cache.ssd.names import LOCK, QUARANTINE, VERSION
from mlx_swarm.broker.cache_cli import app
from mlx_swarm.broker.errors import CacheError
from tests.cache.ssd.folders import CAP, files, store_all


def output(*arguments: str) -> str:
    """What a command prints; raises what it fails with."""
    result = CliRunner().invoke(app, arguments, catch_exceptions=False, standalone_mode=False)
    return result.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store_all(tmp_path, [range(30), range(50)], "state", "one")
    store_all(tmp_path, [range(40)], "full", "two")
    return tmp_path


def test_lists_each_namespace(folder: Path) -> None:
    rows = [line.split() for line in output("ls", "-C", str(folder)).splitlines()[1:]]
    assert sorted((row[1], row[2]) for row in rows) == [("1", "40"), ("2", "50")]
    assert all(row[-2:] == ["model", "unknown"] for row in rows)


def test_names_the_model_if_the_files_do(folder: Path) -> None:
    store_all(folder, [range(60)], "full", "two", model="org/tiny")
    rows = output("ls", "-C", str(folder)).splitlines()[1:]
    assert sorted(row.split()[-1] for row in rows) == ["org/tiny", "unknown"]
    [named] = [row.split()[0] for row in rows if row.endswith("org/tiny")]
    shown = output("show", named, "-C", str(folder))
    assert shown.count("org/tiny") == shown.count("model unknown") == 1


def test_lists_also_what_is_damaged(folder: Path) -> None:
    for path in files(folder):
        facts = path.stat()
        path.write_bytes(bytes(facts.st_size))
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert output("ls", "-C", str(folder)).count("model unknown") == 2


def test_says_that_there_is_nothing(folder: Path) -> None:
    output("rm", "--all", "-C", str(folder))
    assert output("ls", "-C", str(folder)) == f"there is nothing in {folder}\n"


def test_alone_it_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["cache"]) == 0
    captured = capsys.readouterr()
    assert "verify" in captured.out
    assert captured.err == ""


def test_tells_of_the_quarantine_and_removes_it_with_all(folder: Path) -> None:
    aside = folder / VERSION / QUARANTINE
    aside.mkdir()
    files(folder)[0].rename(aside / files(folder)[0].name)
    for command in ("ls", "verify"):
        assert "\n1 corrupt file with " in output(command, "-C", str(folder))
    namespace = output("ls", "-C", str(folder)).splitlines()[1].split()[0]
    assert "in quarantine" not in output("rm", namespace, "-C", str(folder))
    assert output("rm", "--all", "-C", str(folder)).endswith(", and 1 in quarantine\n")
    assert not aside.exists()
    assert "corrupt" not in output("ls", "-C", str(folder))


def test_shows_files_by_the_beginning_of_their_name_or_namespace(folder: Path) -> None:
    for path in files(folder):
        text = output("show", path.name[:40], "-C", str(folder))
        assert text.startswith(path.name.removesuffix(".safetensors"))
    namespace = output("ls", "-C", str(folder)).splitlines()[-1].split()[0]
    assert "and a checkpoint" in output("show", namespace, "-C", str(folder))


def test_verifies_every_byte(folder: Path) -> None:
    assert output("verify", "-C", str(folder)).startswith("3 files with")
    path = files(folder)[0]
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CacheError, match="1 file is not whole"):
        output("verify", "-C", str(folder))
    assert len(files(folder)) == 3


@pytest.mark.parametrize("size", [0, 300, -1])
def test_verifies_also_what_no_index_has(folder: Path, size: int) -> None:
    path = files(folder)[0]
    os.truncate(path, size % path.stat().st_size)
    with pytest.raises(CacheError, match="1 file is not whole"):
        output("verify", "-C", str(folder))


def test_tells_files_of_others_from_broken_ones(folder: Path) -> None:
    path = files(folder)[0]
    path.write_bytes(path.read_bytes().replace(b'format":"1"', b'format":"9"'))
    assert "1 file is of another version" in output("verify", "-C", str(folder))


def test_a_file_that_goes_meanwhile_is_no_fault(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = files(folder)[0]

    def open_others(self: Disk, path: Path, do: Any = Disk.open) -> FileIO:
        if path == gone:
            raise FileNotFoundError(path)
        return cast("FileIO", do(self, path))

    monkeypatch.setattr(Disk, "open", open_others)
    assert output("verify", "-C", str(folder)).startswith("2 files with")
    assert output("show", gone.name[:40], "-C", str(folder)) == ""


def test_removes_a_namespace_or_all(folder: Path) -> None:
    namespace = output("ls", "-C", str(folder)).splitlines()[1].split()[0]
    assert output("rm", namespace, "-C", str(folder)) == "removed 1 file\n"
    assert len(files(folder)) == 2
    assert output("rm", "--all", "-C", str(folder)) == "removed 2 files\n"
    assert not files(folder)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rm"], "say what to remove"),
        (["rm", "ab", "--all"], "not both"),
        (["rm", "xyz"], "begins with 'xyz'"),
        (["show", "xyz"], "begins with 'xyz'"),
    ],
)
def test_says_what_it_cannot_do(folder: Path, arguments: Sequence[str], said: str) -> None:
    with pytest.raises(CacheError, match=said):
        output(*arguments, "-C", str(folder))
    assert len(files(folder)) == 3


def test_removes_nothing_that_a_broker_uses(folder: Path) -> None:
    with SsdStore(folder, CAP), pytest.raises(CacheError, match="another process"):
        output("rm", "--all", "-C", str(folder))
    assert len(files(folder)) == 3


def test_says_why_nothing_can_be_removed(folder: Path) -> None:
    (folder / VERSION / LOCK).unlink()
    (folder / VERSION / LOCK).mkdir()
    with pytest.raises(CacheError, match="Is a directory"):
        output("rm", "--all", "-C", str(folder))
    assert len(files(folder)) == 3


def test_a_folder_without_a_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="no cold store"):
        output("ls", "-C", str(tmp_path))
