"""All-or-nothing writing: two writers at once, failures, what a killed process leaves."""

import os
import time
from pathlib import Path

import pytest

from mlx_swarm.broker.errors import ModelError
from mlx_swarm.broker.models.cache_folder import (
    PARTIAL_LIFETIME_SECONDS,
    PARTIAL_PREFIX,
    cache_folder,
    publishing,
    write_file,
)


def test_the_folder_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MLX_SWARM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "mlx-swarm"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/mlx-swarm")
    monkeypatch.setenv("MLX_SWARM_CACHE", "~/mine")
    assert cache_folder() == tmp_path / "mine"
    assert cache_folder("/given") == Path("/given")


def test_without_a_home_it_says_what_to_set() -> None:
    with pytest.raises(ModelError, match="~no-such-user/cache: set MLX_SWARM_CACHE"):
        cache_folder("~no-such-user/cache")


def test_a_folder_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "models" / "tiny"
    with pytest.raises(ZeroDivisionError), publishing(target) as folder:
        (folder / "config.json").write_text(str(1 / 0))
    assert list(target.parent.iterdir()) == []
    with publishing(target) as folder:
        (folder / "config.json").write_text("{}")
        assert not target.exists()
    assert [path.name for path in target.parent.iterdir()] == ["tiny"]


def test_of_two_writers_at_once_the_first_wins(tmp_path: Path) -> None:
    target = tmp_path / "tiny"
    with publishing(target) as late:
        (late / "config.json").write_text("late")
        with publishing(target) as early:
            (early / "config.json").write_text("early")
    assert (target / "config.json").read_text() == "early"
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_what_a_killed_process_left_is_removed_after_a_day(tmp_path: Path) -> None:
    old, recent = (tmp_path / f"{PARTIAL_PREFIX}{name}" for name in ("old", "recent"))
    for folder in (old, recent):
        folder.mkdir()
        (folder / "model.safetensors").touch()
    long_ago = time.time() - PARTIAL_LIFETIME_SECONDS - 1
    os.utime(old, (long_ago, long_ago))
    write_file(tmp_path / "digests.json", b"{}")
    assert not old.exists()
    assert recent.exists()


def test_a_target_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"cannot write to the cache folder .*file") as error:
        write_file(tmp_path / "file" / "digests.json", b"{}")
    assert "\n" not in str(error.value)
