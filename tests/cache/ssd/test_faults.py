"""A disk that fails: the request is served, something counts, one warning, RAM loses nothing."""

import errno
import logging
import os
import shutil
from pathlib import Path

import pytest

from mlx_swarm.broker.cache.prompt_cache import PromptCache
from mlx_swarm.broker.cache.ssd import SsdStore
from mlx_swarm.broker.cache.ssd.names import QUARANTINE, SUFFIX, UNFINISHED, VERSION
from tests.cache.helpers import TOKEN_BYTES, put, sequence, taken
from tests.cache.ssd.folders import (
    CAP,
    RAM,
    SECONDS,
    FailingDisk,
    failure,
    files,
    headers,
    quarantined,
    store_all,
)
from tests.cache.world import Clock


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)


@pytest.fixture
def disk() -> FailingDisk:
    return FailingDisk()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("operation", ["create", "write", "sync", "replace", "sync_folder"])
def test_a_failed_write_costs_nothing_in_ram_and_leaves_nothing_on_disk(
    tmp_path: Path,
    disk: FailingDisk,
    operation: str,
    code: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    with SsdStore(tmp_path, CAP, disk=disk) as store:
        cache = PromptCache(RAM, cold=store, clock=clock)
        put(cache, range(30))
        disk.failing[operation] = failure(code)
        assert cache.flush(SECONDS).writes == 1
        assert cache.demote_idle(0) == 0
        assert taken(cache, [*range(30), 7]) == 30
        assert store.statistics().write_failures >= 1
        assert not list((tmp_path / VERSION).glob(f"*{UNFINISHED}"))
        told = [r for r in caplog.records if r.name.endswith("ssd.store")]
        assert len(told) == 1

        disk.failing.clear()
        clock.now += 60
        assert cache.flush(SECONDS) == (0, 0)
        assert "works again" in caplog.text
    with SsdStore(tmp_path, CAP) as store:
        assert taken(PromptCache(RAM, cold=store), [*range(30), 7]) == 30


def test_a_store_that_keeps_failing_is_tried_again_later(
    tmp_path: Path, disk: FailingDisk, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    with SsdStore(tmp_path, CAP, disk=disk) as store:
        cache = PromptCache(20 * TOKEN_BYTES, cold=store, clock=clock)
        disk.failing["write"] = failure(errno.ENOSPC)
        for start in range(1000, 1010):
            put(cache, sequence(start, 12))
            store.flush(SECONDS)
        assert cache.total_bytes <= 20 * TOKEN_BYTES
        assert cache.find_exact(sequence(1009, 12)) is not None
        failures = store.statistics().write_failures
        assert failures >= 3
        assert caplog.text.count("unavailable") == 1
        disk.failing.clear()
        put(cache, sequence(2000, 12))
        assert store.statistics().write_failures == failures
        clock.now += 60
        assert cache.flush(SECONDS) == (0, 0)
        assert "available again" in caplog.text


@pytest.mark.parametrize("operation", ["open", "read"])
def test_what_cannot_be_read_is_computed_and_stays_on_disk(
    tmp_path: Path, disk: FailingDisk, operation: str
) -> None:
    store_all(tmp_path, [range(30)])
    with SsdStore(tmp_path, CAP, disk=disk) as store:
        cache = PromptCache(RAM, cold=store)
        disk.failing[operation] = failure(errno.EIO)
        assert taken(cache, [*range(30), 7]) == 0
        assert cache.statistics().total.reasons == {"restore_failed": 1}
        assert store.statistics().unreadable == 1
    assert len(files(tmp_path)) == 1
    with SsdStore(tmp_path, CAP) as store:
        assert taken(PromptCache(RAM, cold=store), [*range(30), 7]) == 30


def test_a_short_read_is_corruption(tmp_path: Path, disk: FailingDisk) -> None:
    store_all(tmp_path, [range(30)])
    with SsdStore(tmp_path, CAP, disk=disk) as store:
        cache = PromptCache(RAM, cold=store)
        disk.reads_at_most = 3000
        assert taken(cache, [*range(30), 7]) == 0
        assert store.statistics().quarantined == 1
    assert len(quarantined(tmp_path)) == 1


def test_a_place_where_nothing_can_be_is_told_with_the_reason(
    tmp_path: Path, disk: FailingDisk, caplog: pytest.LogCaptureFixture
) -> None:
    disk.failing["make_folder"] = failure(errno.EACCES)
    with SsdStore(tmp_path / "kv", CAP, disk=disk):
        [said] = caplog.messages
    assert said == (
        f"nothing will be kept in {tmp_path / 'kv' / VERSION}: "
        "it cannot be written (Permission denied)"
    )


@pytest.mark.parametrize("operation", ["make_folder", "lock"])
def test_a_folder_that_cannot_be_written_is_only_read(
    tmp_path: Path, disk: FailingDisk, operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    store_all(tmp_path, [range(30)])
    disk.failing[operation] = failure(errno.EACCES)
    with SsdStore(tmp_path, CAP, disk=disk) as store:
        cache = PromptCache(20 * TOKEN_BYTES, cold=store)
        assert store.statistics().is_read_only
        assert "which is only read: it cannot be written (Permission denied)" in caplog.text
        for start in range(1000, 1005):
            assert put(cache, sequence(start, 12)).stored
        assert cache.total_bytes <= 20 * TOKEN_BYTES
        cache = PromptCache(RAM, cold=store)
        assert taken(cache, [*range(30), 7]) == 30
        put(cache, sequence(1, 9))
        assert cache.flush(SECONDS).writes == 1
    assert len(files(tmp_path)) == 1


def test_a_folder_that_cannot_be_listed_holds_nothing(tmp_path: Path, disk: FailingDisk) -> None:
    disk.failing["entries"] = failure(errno.EIO)
    with SsdStore(tmp_path, CAP, disk=disk) as store:
        assert store.statistics().files == 0
        assert PromptCache(RAM, cold=store).plan([1, 2]).usable_tokens == 0


def test_many_broken_files_are_told_of_in_few_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store_all(tmp_path, [range(30)])
    for number in range(200):
        (tmp_path / VERSION / f"{number:032x}-64.0{SUFFIX}").write_bytes(b"tiny")
    with SsdStore(tmp_path, CAP) as store:
        assert store.statistics().quarantined == 200
        assert len(caplog.records) == 11
        assert taken(PromptCache(RAM, cold=store), [*range(30), 7]) == 30
    assert len(quarantined(tmp_path)) == 200


def test_the_quarantine_does_not_fill_the_disk(tmp_path: Path) -> None:
    store_all(tmp_path, [range(30)])
    aside = tmp_path / VERSION / QUARANTINE
    aside.mkdir()
    for number in range(20):
        path = aside / f"{number:032x}-64.0{SUFFIX}"
        path.write_bytes(bytes(1000))
        os.utime(path, (1000 + number, 1000 + number))
    with SsdStore(tmp_path, 100_000):
        assert [path.name[30:32] for path in quarantined(tmp_path)] == [
            f"{number:02x}" for number in range(10, 20)
        ]
    assert len(files(tmp_path)) == 1


def test_a_folder_removed_while_running_is_filled_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with SsdStore(tmp_path, CAP) as store:
        cache = PromptCache(RAM, cold=store)
        put(cache, range(30))
        assert cache.flush(SECONDS) == (0, 0)
        shutil.rmtree(tmp_path / VERSION)
        put(cache, range(60))
        # What was durable is so no more, and RAM knows once it has to.
        cache.flush(SECONDS)
        assert cache.flush(SECONDS) == (0, 0)
        assert "was removed" in caplog.text
        assert sum(len(header.tokens) // 4 for header in headers(tmp_path)) == 60
        store.check_integrity()
    with SsdStore(tmp_path, CAP) as store:
        assert taken(PromptCache(RAM, cold=store), [*range(60), 7]) == 60


def test_a_file_removed_while_running_is_a_miss(tmp_path: Path) -> None:
    store_all(tmp_path, [range(30)])
    with SsdStore(tmp_path, CAP) as store:
        cache = PromptCache(RAM, cold=store)
        files(tmp_path)[0].unlink()
        assert taken(cache, [*range(30), 7]) == 0
        assert cache.plan([*range(30), 7]).cold_tokens == 0
        assert store.statistics().unreadable == 1


def test_ram_does_not_let_go_of_what_the_store_lost(tmp_path: Path) -> None:
    clock = Clock()
    store_all(tmp_path, [range(30)])
    with SsdStore(tmp_path, CAP) as store:
        cache = PromptCache(RAM, cold=store, clock=clock)
        put(cache, range(40))
        assert cache.flush(SECONDS) == (0, 0)
        match = store.find(cache.tree().tokens_of(cache.tree().find(range(40))), "")  # type: ignore[arg-type]
        assert match is not None
        store.delete(match)
        clock.now += 10
        assert cache.demote_idle(5) == 0
        store.flush(SECONDS)
        assert cache.demote_idle(5) == 1
        assert taken(cache, [*range(40), 7]) == 40


def test_the_clock_may_go_back(tmp_path: Path) -> None:
    now = [10**18]
    with SsdStore(tmp_path, 3 * _file_bytes(tmp_path / "probe"), clock_ns=lambda: now[0]) as store:
        cache = PromptCache(RAM, cold=store)
        for start in (1, 2, 3):
            put(cache, sequence(start, 30))
            assert cache.flush(SECONDS) == (0, 0)
            now[0] -= 10**17
        cache.clear()
        assert taken(cache, [*sequence(1, 30), 7]) == 30
        put(cache, sequence(4, 30))
        cache.flush(SECONDS)
        cache.clear()
        kept = [cache.plan([*sequence(start, 30), 7]).cold_tokens for start in (1, 2, 3, 4)]
        assert kept == [30, 0, 30, 30]


def _file_bytes(folder: Path) -> int:
    store_all(folder, [sequence(1, 30)])
    return files(folder)[0].stat().st_size + 64
