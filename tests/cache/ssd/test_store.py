"""The SSD store in use: caps, recency, the lock, the queue, the index that is saved."""

import gc
import logging
import os
import shutil
import subprocess
import sys
import threading
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_swarm.broker.cache.extents import Extent
from mlx_swarm.broker.cache.ledger import Ledger, Purpose
from mlx_swarm.broker.cache.prompt_cache import PromptCache
from mlx_swarm.broker.cache.ssd import SsdStore, pieces
from mlx_swarm.broker.cache.ssd import folder as folder_module
from mlx_swarm.broker.cache.ssd import store as store_module
from mlx_swarm.broker.cache.ssd.disk import Disk
from mlx_swarm.broker.cache.ssd.names import SIDECAR, UNFINISHED, VERSION
from mlx_swarm.broker.cache.ssd.opening import Opened, fill
from mlx_swarm.broker.trace.events import Demoted, Event, Quarantined, Restored, Spilled
from tests.cache.helpers import TOKEN_BYTES, put, sequence, taken
from tests.cache.rows import FAMILIES, build
from tests.cache.ssd.folders import (
    CAP,
    RAM,
    SECONDS,
    files,
    headers,
    longest,
    quarantined,
    store_all,
)
from tests.cache.world import Clock

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=20)


class SlowDisk(Disk):
    """Creates no file before it may, and reads none while it may not."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.may_read = threading.Event()
        self.may_read.set()
        self.is_reading = threading.Event()

    def open(self, path: Path) -> FileIO:
        if not self.may_read.is_set():
            self.is_reading.set()
            assert self.may_read.wait(SECONDS)
        return super().open(path)

    def create(self, path: Path) -> Any:
        assert self.may_write.wait(SECONDS)
        return super().create(path)


HOLD = """
import sys
from pathlib import Path
from mlx_swarm.broker.cache.ssd import SsdStore
with SsdStore(Path(sys.argv[1]), 1 << 30):
    print("mine", flush=True)
    sys.stdin.read()
"""


class Listener:
    """A trace that keeps what it hears."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def now(self) -> float:
        return 1.5

    def emit(self, event: Event) -> None:
        self.events.append(event)


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)


class TestCap:
    def test_lets_the_least_recently_used_leaf_go(self, tmp_path: Path) -> None:
        store_all(tmp_path, [range(30), [*range(30), *range(100, 130)], sequence(7, 30)])
        total = sum(path.stat().st_size for path in files(tmp_path))
        with SsdStore(tmp_path, total + 100) as store:
            cache = PromptCache(RAM, cold=store)
            # The prefix was used longest ago, but something hangs on it.
            assert taken(cache, [*range(30), *range(100, 130), 7]) == 60
            put(cache, sequence(8, 30))
            assert cache.flush(SECONDS).writes == 0
            cache.clear()
            assert cache.plan([*range(30), *range(100, 130), 7]).cold_tokens == 60
            assert cache.plan([*sequence(7, 30), 7]).cold_tokens == 0
            assert cache.plan([*sequence(8, 30), 7]).cold_tokens == 30
            assert store.statistics().evicted == 1
            store.check_integrity()

    def test_recency_survives_a_restart(self, tmp_path: Path) -> None:
        for start in (1, 2, 3):
            store_all(tmp_path, [sequence(start, 30)])
        with SsdStore(tmp_path, CAP) as store:
            assert taken(PromptCache(RAM, cold=store), [*sequence(1, 30), 7]) == 30
        (tmp_path / VERSION / SIDECAR).unlink()
        total = sum(path.stat().st_size for path in files(tmp_path))
        with SsdStore(tmp_path, total + 100) as store:
            cache = PromptCache(RAM, cold=store)
            put(cache, sequence(4, 30))
            assert cache.flush(SECONDS) == (0, 0)
            cache.clear()
            kept = [cache.plan([*sequence(start, 30), 7]).cold_tokens for start in (1, 2, 3, 4)]
            assert kept == [30, 0, 30, 30]

    def test_orphans_go_first_and_are_never_found(self, tmp_path: Path) -> None:
        store_all(tmp_path, [sequence(1, 30), range(30), range(60)])
        parent = next(header for header in headers(tmp_path) if header.tokens[:4] == bytes(4))
        (tmp_path / VERSION / f"{parent.key}.safetensors").unlink()
        total = sum(path.stat().st_size for path in files(tmp_path))
        with SsdStore(tmp_path, total + 1000) as store:
            cache = PromptCache(RAM, cold=store)
            assert store.statistics().orphans == 1
            assert cache.plan([*range(60), 7]).cold_tokens == 0
            put(cache, sequence(2, 30))
            assert cache.flush(SECONDS) == (0, 0)
            assert store.statistics().orphans == 0
            assert cache.plan([*sequence(1, 30), 7]).cold_tokens == 30

    def test_an_orphan_is_found_again_with_its_parent(self, tmp_path: Path) -> None:
        store_all(tmp_path, [range(30), range(60)])
        parent = min(headers(tmp_path), key=lambda header: header.stop)
        (tmp_path / VERSION / f"{parent.key}.safetensors").unlink()
        store_all(tmp_path, [range(30)])
        with SsdStore(tmp_path, CAP) as store:
            assert taken(PromptCache(RAM, cold=store), [*range(60), 7]) == 60

    def test_what_exceeds_it_alone_is_refused_and_leaves_ram_as_without_a_store(
        self, tmp_path: Path
    ) -> None:
        with SsdStore(tmp_path, 10 * TOKEN_BYTES) as store:
            cache = PromptCache(20 * TOKEN_BYTES, cold=store)
            for start in range(1000, 1006):
                assert put(cache, sequence(start, 15)).stored
            assert cache.total_bytes <= 20 * TOKEN_BYTES
            assert cache.demotions == 0
            assert store.statistics().write_failures == 0

    def test_what_is_being_read_stays(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store_all(tmp_path, [sequence(1, 30)])
        (path,) = files(tmp_path)
        with SsdStore(tmp_path, path.stat().st_size + 100) as store:
            cache = PromptCache(RAM, cold=store)
            put(cache, sequence(2, 30))
            read = store._reader.read

            def interrupted(*given: Any) -> Any:
                assert cache.flush(SECONDS).writes == 1
                return read(*given)

            monkeypatch.setattr(store._reader, "read", interrupted)
            assert taken(cache, [*sequence(1, 30), 7]) == 30
            assert path.exists()

    def test_lowered_it_is_kept_from_the_start(self, tmp_path: Path) -> None:
        for start in (1, 2, 3, 4):
            store_all(tmp_path, [sequence(start, 30)])
        sizes = [path.stat().st_size for path in files(tmp_path)]
        with SsdStore(tmp_path, 2 * max(sizes) + 100) as store:
            counts = store.statistics()
            assert (counts.files, counts.evicted) == (2, 2)
            assert counts.bytes <= counts.max_bytes
            assert len(files(tmp_path)) == 2
            cache = PromptCache(RAM, cold=store)
            kept = [cache.plan([*sequence(start, 30), 7]).cold_tokens for start in (1, 2, 3, 4)]
            assert kept == [0, 0, 30, 30]
            store.check_integrity()

    def test_what_had_to_go_before_its_write_was_noted_is_not_durable(self, tmp_path: Path) -> None:
        store_all(tmp_path / "probe", [sequence(1, 30)])
        (path,) = files(tmp_path / "probe")
        disk = SlowDisk()
        with SsdStore(tmp_path / "kv", path.stat().st_size + 100, disk=disk) as store:
            cache = PromptCache(RAM, cold=store)
            for start in (1, 2):
                put(cache, sequence(start, 30))
                assert cache.write_behind()
            disk.may_write.set()
            store.flush(SECONDS)
            assert len(files(tmp_path / "kv")) == 1
            assert cache.flush(0.0).writes == 1


class TestLock:
    def test_a_second_store_only_reads_and_says_so(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        store_all(tmp_path, [range(30)])
        with SsdStore(tmp_path, CAP) as first, SsdStore(tmp_path, CAP) as second:
            assert "another process" in caplog.text
            assert (first.statistics().is_read_only, second.statistics().is_read_only) == (0, 1)
            cache = PromptCache(RAM, cold=second)
            assert taken(cache, [*range(30), 7]) == 30
            put(cache, range(50))
            assert cache.flush(SECONDS).writes == 1
            assert len(files(tmp_path)) == 1
            # What the first one removes is a miss for the second.
            match = first.find(np.arange(30, dtype=np.uint32), "")
            assert match is not None
            first.delete(match)
            assert taken(PromptCache(RAM, cold=second), [*range(30), 7]) == 0
        with SsdStore(tmp_path, CAP) as store:
            assert not store.statistics().is_read_only

    def test_a_reader_moves_no_corrupt_file(self, tmp_path: Path) -> None:
        store_all(tmp_path, [range(30)])
        (path,) = files(tmp_path)
        with SsdStore(tmp_path, CAP), SsdStore(tmp_path, CAP) as second:
            path.write_bytes(path.read_bytes()[:-1] + b"?")
            assert taken(PromptCache(RAM, cold=second), [*range(30), 7]) == 0
            # To a reader it is one that may have been written anew meanwhile.
            counts = second.statistics()
            assert (counts.quarantined, counts.unreadable, counts.files) == (0, 1, 0)
        assert path.exists()

    def test_a_reader_removes_nothing_whatever_its_cap_is(self, tmp_path: Path) -> None:
        store_all(tmp_path, [sequence(start, 30) for start in (1, 2)])
        with SsdStore(tmp_path, CAP), SsdStore(tmp_path, 1) as second:
            assert second.statistics().files == 2
        assert len(files(tmp_path)) == 2

    def test_who_lost_the_folder_does_not_share_it_with_who_made_it_anew(
        self, tmp_path: Path
    ) -> None:
        with SsdStore(tmp_path, CAP) as first:
            cache = PromptCache(RAM, cold=first)
            put(cache, sequence(1, 30))
            assert cache.flush(SECONDS) == (0, 0)
            shutil.rmtree(tmp_path / VERSION)
            with SsdStore(tmp_path, CAP) as second:
                assert not second.statistics().is_read_only
                for start in (2, 3, 4):
                    put(cache, sequence(start, 30))
                    cache.flush(SECONDS)
                assert not files(tmp_path)
                put(other := PromptCache(RAM, cold=second), range(30))
                assert other.flush(SECONDS) == (0, 0)
                second.check_integrity()

    def test_a_file_that_goes_while_a_reader_opens_the_folder_is_no_fault(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        store_all(tmp_path, [range(30)])

        class Vanishing(Disk):
            def open(self, path: Path) -> FileIO:
                path.unlink()
                return super().open(path)

        (tmp_path / VERSION / SIDECAR).unlink()
        with SsdStore(tmp_path, CAP, disk=Vanishing()) as store:
            assert store.statistics().unreadable == 0
        assert not caplog.text

    def test_the_lock_ends_with_its_process_however_that_ends(self, tmp_path: Path) -> None:
        command = [sys.executable, "-c", HOLD, str(tmp_path)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "mine\n"
            with SsdStore(tmp_path, CAP) as store:
                assert store.statistics().is_read_only
            holder.kill()
        with SsdStore(tmp_path, CAP) as store:
            assert not store.statistics().is_read_only

    def test_a_reader_is_right_while_the_other_writes_and_evicts(self, tmp_path: Path) -> None:
        store_all(tmp_path, [sequence(start, 30) for start in range(8)])
        total = sum(path.stat().st_size for path in files(tmp_path))
        with SsdStore(tmp_path, total + 100) as first, SsdStore(tmp_path, CAP) as second:
            writing = PromptCache(RAM, cold=first)
            served = 0
            for start in range(8):
                put(writing, sequence(100 + start, 20 + start))
                writing.flush(SECONDS)
                # Each take compares every byte with a computation.
                served += sum(
                    taken(PromptCache(RAM, cold=second), [*sequence(each, 30), 7]) > 0
                    for each in range(8)
                )
            assert 0 < served < 64
            assert first.statistics().evicted
            assert not quarantined(tmp_path)
            first.check_integrity()

    def test_what_a_crash_left_unfinished_is_removed(self, tmp_path: Path) -> None:
        store_all(tmp_path, [range(30)])
        left = tmp_path / VERSION / f"{'0' * 32}-64.0{UNFINISHED}"
        left.write_bytes(b"half")
        with SsdStore(tmp_path, CAP):
            assert not left.exists()


class TestQueue:
    def test_more_than_it_holds_is_not_taken_and_stays_in_ram(self, tmp_path: Path) -> None:
        disk = SlowDisk()
        with SsdStore(tmp_path, CAP, disk=disk, queue_bytes=40 * TOKEN_BYTES) as store:
            cache = PromptCache(RAM, cold=store)
            for start in range(1000, 1004):
                put(cache, sequence(start, 30))
            assert cache.demote_idle(0) == 0
            assert store.statistics().pending_writes == 1
            assert cache.statistics().total.evictions == 0
            disk.may_write.set()
            assert cache.flush(SECONDS) == (0, 0)
            assert store.statistics().write_failures == 0
            assert cache.demote_idle(0) == 4

    def test_the_same_sequence_is_written_once(self, tmp_path: Path) -> None:
        disk = SlowDisk()
        with SsdStore(tmp_path, CAP, disk=disk) as store:
            caches = [PromptCache(RAM, cold=store) for _ in range(3)]
            for cache in caches:
                put(cache, range(30))
                cache.demote_idle(0)
            assert store.statistics().pending_writes == 3
            disk.may_write.set()
            for cache in caches:
                assert cache.flush(SECONDS) == (0, 0)
            assert store.statistics().writes == 1

    def test_storing_returns_before_anything_is_written(self, tmp_path: Path) -> None:
        disk = SlowDisk()
        with SsdStore(tmp_path, CAP, disk=disk) as store:
            cache = PromptCache(RAM, cold=store)
            put(cache, range(30))
            assert cache.flush(0.01).writes == 1
            disk.may_write.set()
            assert cache.flush(SECONDS).writes == 0

    def test_closing_writes_what_was_taken(self, tmp_path: Path) -> None:
        with SsdStore(tmp_path, CAP) as store:
            cache = PromptCache(RAM, cold=store)
            for start in range(1000, 1010):
                put(cache, sequence(start, 30))
            cache.demote_idle(0)
        assert len(files(tmp_path)) == 10

    def test_closing_gives_up_in_time_and_says_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        disk = SlowDisk()
        store = SsdStore(tmp_path, CAP, disk=disk)
        cache = PromptCache(RAM, cold=store)
        for start in (1, 2):
            put(cache, sequence(start, 30))
        cache.demote_idle(0)
        monkeypatch.setattr(store_module, "LAST_SECONDS", 0.0)
        store.close(0.01)
        assert "before 2 writes" in caplog.text
        assert cache.demote_idle(0) == 0
        assert cache.statistics().total.undurable_bytes == cache.total_bytes
        # The folder is let go once the disk answers.
        with SsdStore(tmp_path, CAP) as second:
            assert second.statistics().is_read_only
        disk.may_write.set()
        monkeypatch.setattr(store_module, "LAST_SECONDS", SECONDS)
        store.close()
        with SsdStore(tmp_path, CAP) as third:
            assert not third.statistics().is_read_only

    def test_closing_does_not_wait_for_a_read_that_hangs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        store_all(tmp_path, [range(30)])
        disk = SlowDisk()
        store = SsdStore(tmp_path, CAP, disk=disk)
        restoration = PromptCache(RAM, cold=store).restoration([*range(30), 7])
        assert restoration is not None
        disk.may_read.clear()
        reading = threading.Thread(target=restoration.run)
        reading.start()
        assert disk.is_reading.wait(SECONDS)
        monkeypatch.setattr(store_module, "LAST_SECONDS", 0.0)
        store.close(0.0)
        assert "hung in a read" in caplog.text
        disk.may_read.set()
        reading.join()
        assert restoration.restored is not None

    def test_closing_does_not_wait_for_an_index_that_cannot_be_saved(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        disk = SlowDisk()
        disk.may_write.set()
        store = SsdStore(tmp_path, CAP, disk=disk)
        put(cache := PromptCache(RAM, cold=store), range(30))
        assert cache.flush(SECONDS) == (0, 0)
        disk.may_write.clear()
        monkeypatch.setattr(store_module, "LAST_SECONDS", 0.0)
        store.close(0.0)
        disk.may_write.set()
        monkeypatch.setattr(store_module, "LAST_SECONDS", SECONDS)
        store.close()
        assert (tmp_path / VERSION / SIDECAR).exists()

    def test_nothing_of_what_was_written_is_kept_while_nothing_else_is(
        self, tmp_path: Path
    ) -> None:
        with SsdStore(tmp_path, CAP) as store:
            cache = PromptCache(RAM, cold=store)
            put(cache, range(30))
            assert cache.flush(SECONDS) == (0, 0)
            cache.clear()
            gc.collect()
            assert not [each for each in gc.get_objects() if isinstance(each, Extent)]


class TestIndex:
    def test_is_believed_only_of_files_that_did_not_change(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store_all(tmp_path, [sequence(start, 30) for start in (1, 2, 3)])
        found: list[Opened] = []

        def noted(*given: Any, **named: Any) -> Opened:
            found.append(fill(*given, **named))
            return found[-1]

        monkeypatch.setattr(folder_module, "fill", noted)
        with SsdStore(tmp_path, CAP):
            pass
        os.utime(files(tmp_path)[0])
        with SsdStore(tmp_path, CAP) as store:
            assert len(files(tmp_path)) == store.statistics().files == 3
        (tmp_path / VERSION / SIDECAR).write_bytes(b"nonsense")
        with SsdStore(tmp_path, CAP) as store:
            assert store.statistics().files == 3
        assert [each.headers_read for each in found] == [0, 1, 3]

    def test_is_not_waited_for_where_it_is_no_file(self, tmp_path: Path) -> None:
        store_all(tmp_path, [range(30)])
        (tmp_path / VERSION / SIDECAR).unlink()
        os.mkfifo(tmp_path / VERSION / SIDECAR)
        with SsdStore(tmp_path, CAP) as store:
            assert taken(PromptCache(RAM, cold=store), [*range(30), 7]) == 30

    def test_is_saved_while_there_is_nothing_else_to_do(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(folder_module, "SAVE_EVERY", 1)
        with SsdStore(tmp_path, CAP) as store:
            cache = PromptCache(RAM, cold=store)
            put(cache, range(30))
            cache.flush(SECONDS)
            while not (tmp_path / VERSION / SIDECAR).exists():
                threading.Event().wait(0.01)

    @given(data=st.data(), family=st.sampled_from(sorted(FAMILIES)))
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    def test_finds_what_trying_every_length_finds(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, family: str
    ) -> None:
        folder = tmp_path_factory.mktemp("index")
        stored: list[list[int]] = [[0]]
        for _ in range(data.draw(st.integers(1, 5))):
            stem = data.draw(st.sampled_from(stored))
            cut = data.draw(st.integers(0, len(stem)))
            stored.append([*stem[:cut], *data.draw(TOKENS)])
        store_all(folder, stored[1:], family)
        for path in files(folder):
            if data.draw(st.integers(0, 5)) == 0:
                path.unlink()
        known = headers(folder)
        with SsdStore(folder, CAP) as store:
            for tokens in [*stored, *(data.draw(TOKENS) for _ in range(3))]:
                match = store.find(np.array(tokens, np.uint32), "")
                assert (match.length if match else 0) == longest(known, "", tokens)


def test_what_happens_is_traced(tmp_path: Path) -> None:
    clock, listener = Clock(), Listener()
    with SsdStore(tmp_path, CAP) as store:
        cache = PromptCache(RAM, cold=store, clock=clock, trace=listener)
        put(cache, range(30))
        cache.flush(SECONDS)
        clock.now += 10
        assert cache.demote_idle(5) == 1
        assert taken(cache, [*range(30), 7]) == 30
        cache.clear()
        (path,) = files(tmp_path)
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert taken(cache, [*range(30), 7]) == 0
    kinds = (Spilled, Demoted, Restored, Quarantined)
    heard = [event for event in listener.events if isinstance(event, kinds)]
    assert [type(event) for event in heard] == list(kinds)
    spilled, demoted, restored, _ = heard
    assert isinstance(restored, Restored)
    assert (restored.tokens, restored.length, restored.bytes) == (30, 30, 30 * TOKEN_BYTES)
    assert spilled.entry == demoted.entry == restored.entry
    assert len(quarantined(tmp_path)) == 1


def test_an_entry_too_large_for_ram_is_stored(tmp_path: Path) -> None:
    with SsdStore(tmp_path, CAP) as store:
        cache = PromptCache(20 * TOKEN_BYTES, cold=store)
        assert cache.put(range(25), build("full", range(25))).refusal == "oversize"
        store.flush(SECONDS)
    with SsdStore(tmp_path, CAP) as store:
        assert taken(PromptCache(RAM, cold=store), [*range(25), 7]) == 25


def test_statistics_add_up(tmp_path: Path) -> None:
    with SsdStore(tmp_path, CAP) as store:
        cache = PromptCache(RAM, cold=store)
        put(cache, range(30))
        cache.flush(SECONDS)
        cache.clear()
        assert taken(cache, [*range(30), 7]) == 30
        counts = cache.statistics().cold
        assert counts is not None
        assert counts.files == counts.writes == counts.restores == 1
        assert counts.bytes == counts.written_bytes == files(tmp_path)[0].stat().st_size
        assert counts.restored_bytes == 30 * TOKEN_BYTES
        assert counts.restore_seconds > 0


class WatchedDisk(Disk):
    """Notes what the ledger says while payloads are read and written."""

    def __init__(self) -> None:
        self.ledger = Ledger(1 << 20)
        self.seen: dict[Purpose, set[int]] = {Purpose.RESTORES: set(), Purpose.SPILLS: set()}

    def read_into(self, file: FileIO, offset: int, buffer: memoryview) -> int:
        self.seen[Purpose.RESTORES].add(self.ledger.used(Purpose.RESTORES))
        return super().read_into(file, offset, buffer)

    def write(self, file: FileIO, data: memoryview) -> None:
        self.seen[Purpose.SPILLS].add(self.ledger.used(Purpose.SPILLS))
        super().write(file, data)


@pytest.mark.parametrize("copies", [False, True])
def test_what_is_read_and_copies_to_be_written_are_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: bool
) -> None:
    monkeypatch.setattr(pieces, "is_host_memory", lambda: not copies)
    disk = WatchedDisk()
    with SsdStore(tmp_path, CAP, disk=disk, ledger=disk.ledger) as store:
        put(first := PromptCache(RAM, cold=store), range(40))
        assert first.flush(SECONDS) == (0, 0)
        assert disk.seen[Purpose.SPILLS] == {40 * TOKEN_BYTES * copies}
        disk.seen[Purpose.RESTORES].clear()
        cache = PromptCache(RAM, cold=store, ledger=disk.ledger)
        assert taken(cache, [*range(40), 7]) == 40
        assert disk.seen[Purpose.RESTORES] == {40 * TOKEN_BYTES}
        cache.clear()
        assert not disk.ledger.total
        files(tmp_path)[0].write_bytes(b"broken")
        assert not taken(PromptCache(RAM, cold=store, ledger=disk.ledger), [*range(40), 7])
        assert not disk.ledger.total
