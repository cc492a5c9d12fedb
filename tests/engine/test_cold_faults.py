"""What the cold tier must not do to the engine: stall it, outlive it, go round in circles."""

import re
import shutil
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from mlx_swarm.broker import Broker, BrokerClosed, Completed, InvalidRequest
from mlx_swarm.broker.cache.ledger import Purpose
from mlx_swarm.broker.cache.ssd import store
from mlx_swarm.broker.engine import loop
from mlx_swarm.broker.errors import InvalidSetting, ModelUnreadable
from mlx_swarm.broker.trace import events
from tests.engine.conftest import HeldWrites
from tests.engine.test_restoring import files, is_restoring, until
from tests.tiny_broker import check_idle, inside, request, tiny

pytestmark = pytest.mark.anyio

SEQUENCE_BYTES = 56_000
"""About what 100 tokens and a reply take in RAM, and on disk."""


def asked(agent: int, tokens: int = 100, **fields: Any) -> Any:
    """A prompt that shares nothing with those of other agents."""
    own = [(agent * 37 + 5 * at) % 240 + 10 for at in range(tokens)]
    return request(agent, tokens=own, **fields)


def own_threads() -> list[str]:
    """The threads of brokers."""
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name.startswith("mlx-swarm")]


async def check_nothing_left(broker: Broker) -> None:
    """Assert that neither a request nor the tier holds anything any more."""
    await broker.flush(10)
    await check_idle(broker)

    def look(engine: loop.EngineLoop) -> tuple[int, ...]:
        purposes = Purpose.RESTORES, Purpose.SPILLS, Purpose.TAILS
        return tuple(engine.ledger.used(purpose) for purpose in purposes)

    assert await inside(broker, look) == (0, 0, 0)


async def test_a_broker_without_work_goes_on_writing(
    tmp_path: Path, held_writes: HeldWrites
) -> None:
    # A quarter of this may be on its way at a time: less than what is put.
    async with tiny(cold=tmp_path, ram=7 * SEQUENCE_BYTES) as broker:
        for agent in range(4):
            await broker.complete(asked(agent))
        held_writes.go.set()
        await until(lambda: len(files(tmp_path)) >= 4)
        await check_nothing_left(broker)


async def test_a_request_waits_for_memory_that_is_still_being_written(
    tmp_path: Path, held_writes: HeldWrites
) -> None:
    async with tiny() as broker:
        weights = (await broker.statistics()).engine.memory.committed["weights"]
    # Room for one sequence and a row, or for a row twice as long.
    memory = weights + int(2.4 * SEQUENCE_BYTES)
    async with tiny(cold=tmp_path, memory=memory) as broker, anyio.create_task_group() as tasks:
        await broker.complete(asked(1))
        await until(held_writes.begun.is_set)
        ended = anyio.Event()

        async def second() -> None:
            await broker.complete(asked(2, tokens=200))
            ended.set()

        tasks.start_soon(second)
        await anyio.sleep(0.3)
        assert not ended.is_set()
        held_writes.go.set()
        await ended.wait()
        await check_nothing_left(broker)


async def test_a_folder_too_small_for_all_is_not_written_again_and_again(tmp_path: Path) -> None:
    async with tiny(cold=tmp_path, cold_limit=int(2.5 * SEQUENCE_BYTES)) as broker:
        for agent in range(4):
            await broker.complete(asked(agent))
        assert (await broker.flush(3)).writes
        cold = (await broker.statistics()).engine.cache.cold
        assert cold is not None
        assert cold.writes <= 3 * 4
        assert cold.bytes <= cold.max_bytes


async def test_who_only_reads_a_folder_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with tiny(cold=tmp_path), tiny(cold=tmp_path) as second:
        await second.complete(asked(1))
        assert (await second.flush(3)).writes
    [said] = caplog.messages
    assert said.endswith("only read: another process writes to it")


async def test_closing_says_how_much_is_not_on_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with tiny(cold=tmp_path, cold_limit=SEQUENCE_BYTES // 4) as broker:
        await broker.complete(asked(1))
    [said] = [line for line in caplog.messages if "closed" in line]
    assert re.fullmatch(r"closed before all sequences were on disk: [\d.]+ KiB are missing", said)


async def test_an_engine_that_cannot_start_lets_the_folder_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> None:
        raise ValueError("on purpose")

    with monkeypatch.context() as broken:
        broken.setattr(loop, "BatchLane", fail)
        with pytest.raises(ModelUnreadable, match="on purpose"):
            await tiny(cold=tmp_path).__aenter__()
    async with tiny(cold=tmp_path) as broker:
        cold = (await broker.statistics()).engine.cache.cold
        assert cold is not None
        assert not cold.is_read_only


async def test_what_was_read_for_nobody_cannot_end_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hold: threading.Event
) -> None:
    async with tiny(cold=tmp_path) as broker:
        reply = await broker.complete(asked(0))
    async with tiny(cold=tmp_path) as broker:
        cache: Any = await inside(broker, lambda engine: engine.cache)
        async with broker.stream(asked(0)) as stream:
            await is_restoring(broker)
            stream.cancel()
            assert isinstance([event async for event in stream][-1], Completed)
        with monkeypatch.context() as broken:
            asking: list[object] = []

            def fail(*given: object) -> None:
                asking.append(given)
                raise RuntimeError("out of device memory, on purpose")

            broken.setattr(cache, "lease", fail)
            hold.set()
            await until(lambda: bool(asking))
        assert (await broker.complete(asked(0))).tokens == reply.tokens
        await check_nothing_left(broker)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("ram", [64 << 20, 3 * SEQUENCE_BYTES])
async def test_who_waits_for_the_disk_is_served_in_order(
    tmp_path: Path, rows: int, ram: int
) -> None:
    async with tiny(cold=tmp_path) as broker:
        replies = [(await broker.complete(asked(agent))).tokens for agent in range(3)]
    async with tiny(cold=tmp_path, max_rows=rows, ram=ram) as broker:
        # Without agents: sessions that memory has a place for would go first.
        streams = [broker.stream(replace(asked(number % 3), agent="")) for number in range(9)]
        for number, stream in enumerate(streams):
            end = [event async for event in stream][-1]
            assert isinstance(end, Completed)
            assert end.tokens == replies[number % 3]
            assert end.usage.prefilled_tokens == 1
        over = [e.request for e in broker.recorder.events() if isinstance(e, events.Finished)]
        await check_nothing_left(broker)
    places = [over.index(stream.request) for stream in streams]
    assert all(abs(place - number) < rows for number, place in enumerate(places))


async def test_what_leaves_a_small_ram_comes_back_the_same(tmp_path: Path) -> None:
    async with tiny(cold=tmp_path, ram=int(2.5 * SEQUENCE_BYTES)) as broker:
        rounds = [[(await broker.complete(asked(a))).tokens for a in range(5)] for _ in range(2)]
        seen = [type(event) for event in broker.recorder.events()]
        await check_nothing_left(broker)
    assert rounds[0] == rounds[1]
    first = [seen.index(kind) for kind in (events.Spilled, events.Demoted, events.Restored)]
    assert first == sorted(first)
    assert events.Evicted not in seen


async def test_a_folder_that_is_removed_is_filled_again(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    async with tiny(cold=folder, ram=int(2.5 * SEQUENCE_BYTES)) as broker:
        first = [(await broker.complete(asked(agent))).tokens for agent in range(5)]
        await broker.flush()
        shutil.rmtree(folder)
        again = [(await broker.complete(asked(agent))).tokens for agent in range(5)]
        await check_nothing_left(broker)
    async with tiny(cold=folder) as broker:
        later = [await broker.complete(asked(agent)) for agent in range(5)]
    assert first == again == [reply.tokens for reply in later]
    # Not each: the gate may find that computing is faster than this disk.
    assert any(reply.usage.cold_tokens for reply in later)


@pytest.mark.parametrize("cold", ["", 5, True, b"folder", [], "a\0b", "~nobody-of-that-name/kv"])
def test_what_cannot_name_a_folder_is_refused(cold: Any) -> None:
    with pytest.raises(InvalidSetting, match="cold is "):
        tiny(cold=cold)


@pytest.mark.parametrize("seconds", [-1, float("inf"), float("nan"), "1", None])
async def test_a_flush_takes_a_number_of_seconds(tmp_path: Path, seconds: Any) -> None:
    async with tiny(cold=tmp_path) as broker:
        with pytest.raises(InvalidRequest, match="seconds is "):
            await broker.flush(seconds)


async def test_closing_ends_while_the_disk_hangs_and_says_what_is_lost(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    held_writes: HeldWrites,
) -> None:
    monkeypatch.setattr(loop, "CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(store, "LAST_SECONDS", 0.1)
    async with tiny(cold=tmp_path) as broker:
        await broker.complete(asked(0))
    assert not held_writes.go.is_set()
    assert "sequences" in caplog.text
    assert "writes" in caplog.text
    held_writes.go.set()
    await until(lambda: not own_threads())


async def test_closing_ends_while_a_reading_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hold: threading.Event
) -> None:
    async with tiny(cold=tmp_path) as broker:
        await broker.complete(asked(0))
        await broker.flush()
    monkeypatch.setattr(loop, "CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(store, "LAST_SECONDS", 0.1)
    async with tiny(cold=tmp_path) as broker:
        stream = broker.stream(asked(0))
        await is_restoring(broker)
    with pytest.raises(BrokerClosed):
        await anext(stream)
    assert not hold.is_set()
    hold.set()
    await until(lambda: not own_threads())
