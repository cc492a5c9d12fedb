"""The recorder: the ring, the file, and what happens when either is full or broken."""

import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from mlx_swarm.broker.errors import TraceError
from mlx_swarm.broker.trace.events import TRACE_VERSION, FirstToken, TraceStarted, encode
from mlx_swarm.broker.trace.recorder import Recorder, read_trace


def emit_tokens(recorder: Recorder, count: int) -> list[FirstToken]:
    events = [FirstToken(time=recorder.now(), request=f"r{number}") for number in range(count)]
    for event in events:
        recorder.emit(event)
    return events


def test_the_ring_keeps_the_latest_and_counts_what_left() -> None:
    with Recorder(capacity=3, clock=lambda: 5.0, model="tiny", backend="cpu") as recorder:
        events = emit_tokens(recorder, 5)
        assert recorder.events() == [recorder.started, *events[2:]]
        statistics = recorder.statistics()
    assert (statistics.emitted, statistics.dropped, statistics.unwritten) == (5, 2, 0)
    assert (recorder.started.time, recorder.started.model) == (5.0, "tiny")


def test_the_file_holds_every_event_even_those_that_left_the_ring(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with Recorder(capacity=64, path=path) as recorder:
        events = emit_tokens(recorder, 40)
    assert read_trace(path) == [recorder.started, *events]
    assert recorder.events() == read_trace(path)
    assert recorder.statistics().unwritten == 0


def test_the_file_is_private_even_if_it_was_there_before(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("of an earlier run\n")
    path.chmod(0o644)
    Recorder(path=path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [type(event) for event in read_trace(path)] == [TraceStarted]


def test_a_device_keeps_its_mode() -> None:
    mode = os.stat(os.devnull).st_mode
    with Recorder(path=os.devnull) as recorder:
        emit_tokens(recorder, 3)
    assert os.stat(os.devnull).st_mode == mode


def test_closing_twice_is_harmless_and_later_events_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    recorder = Recorder(path=path)
    recorder.close()
    recorder.close()
    emit_tokens(recorder, 2)
    assert recorder.statistics().unwritten == 2
    assert len(recorder.events()) == 3
    assert len(read_trace(path)) == 1


def test_closing_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with Recorder(path=tmp_path / "trace.jsonl"):
        assert set(threading.enumerate()) > before
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("name", ["missing/trace.jsonl", "."])
def test_a_path_that_cannot_be_written_is_a_one_line_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(TraceError, match=r"^cannot write trace .*: [^\n]+$"):
        Recorder(path=tmp_path / name)


@pytest.mark.parametrize("path", ["", "a\0b", 5])
def test_what_is_no_path_is_a_one_line_error(path: Any) -> None:
    with pytest.raises(TraceError, match=r"^cannot write trace .*: [^\n]+$"):
        Recorder(path=path)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_never_reaches_the_caller() -> None:
    with Recorder(path="/dev/full") as recorder:
        emit_tokens(recorder, 10)
    statistics = recorder.statistics()
    assert statistics.unwritten >= 10
    assert "No space left" in statistics.file_error
    assert len(recorder.events()) == 11


def test_an_event_that_json_cannot_hold_is_skipped_alone(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with Recorder(path=path) as recorder:
        recorder.emit(FirstToken(time=0.0, request="\ud800"))
        events = emit_tokens(recorder, 1)
    assert read_trace(path) == [recorder.started, *events]
    assert recorder.statistics().unwritten == 1


def test_many_threads_emit_at_once(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with Recorder(path=path) as recorder:
        threads = [threading.Thread(target=emit_tokens, args=(recorder, 200)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert recorder.statistics().emitted == 1600
    assert len(read_trace(path)) == 1601


def write_lines(path: Path, *lines: bytes, version: int = TRACE_VERSION) -> Path:
    started = TraceStarted(time=0.0, version=version, wall_time=0.0, model="", backend="")
    path.write_bytes(b"\n".join([encode(started), *lines, b""]))
    return path


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    good = encode(FirstToken(time=1.0, request="r"))
    path = write_lines(tmp_path / "trace.jsonl", good, b'{"event":"Unheard"}')
    with pytest.raises(TraceError, match="line 3: "):
        read_trace(path)


def test_the_unfinished_line_of_a_killed_process_is_ignored(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "trace.jsonl")
    with path.open("ab") as file:
        file.write(b'{"event":"FirstTok')
    assert len(read_trace(path)) == 1


def test_another_version_is_refused_before_its_events_are_read(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "trace.jsonl", b'{"event":"Unheard"}', version=99)
    with pytest.raises(TraceError, match="version 99; this reads 1"):
        read_trace(path)


@pytest.mark.parametrize("content", [b"", b'{"event":"FirstToken","time":0,"request":"r"}\n'])
def test_a_trace_without_its_header_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="line 1"):
        read_trace(path)


def test_a_missing_trace_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read trace"):
        read_trace(tmp_path / "absent.jsonl")
