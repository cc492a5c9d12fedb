"""Prompts that survive a restart: read once for all who wait, off the engine's thread."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from mlx_swarm.broker import Broker, BrokerClosed, Completed, Started
from mlx_swarm.broker.errors import InvalidSetting
from mlx_swarm.broker.trace import events
from tests.tiny_broker import SHARED, check_idle, inside, prompt, request, tiny

pytestmark = pytest.mark.anyio

OWN = 20


async def fill(folder: Path, agents: int = 2) -> list[tuple[int, ...]]:
    """A first process: its agents' replies, all of them durable."""
    async with tiny(cold=folder) as broker:
        replies = [await broker.complete(asked(agent)) for agent in range(agents)]
        left = await broker.flush()
        assert (left.writes, left.bytes) == (0, 0)
        await check_idle(broker)
    return [reply.tokens for reply in replies]


def asked(agent: int, **fields: Any) -> Any:
    return request(agent, tokens=prompt(agent, own=OWN), **fields)


async def test_a_prompt_is_read_from_disk_after_a_restart(tmp_path: Path) -> None:
    replies = await fill(tmp_path)
    async with tiny(cold=tmp_path) as broker:
        again = [await broker.complete(asked(agent)) for agent in range(2)]
        await check_idle(broker)
    assert [reply.tokens for reply in again] == replies
    assert again[0].usage.cold_tokens == len(SHARED) + OWN - 1
    assert again[1].usage.ram_tokens >= len(SHARED)
    assert again[1].usage.prefilled_tokens == 1


async def test_what_is_put_reaches_the_disk_without_a_flush(tmp_path: Path) -> None:
    async with tiny(cold=tmp_path) as broker:
        await broker.complete(asked(0))
        await until(lambda: bool(files(tmp_path)))


async def test_many_who_want_the_same_read_it_once(tmp_path: Path) -> None:
    replies = await fill(tmp_path, agents=6)
    ends: dict[int, Completed] = {}
    async with tiny(cold=tmp_path) as broker:

        async def run(agent: int) -> None:
            ends[agent] = await broker.complete(asked(agent))

        async with anyio.create_task_group() as group:
            for agent in range(6):
                group.start_soon(run, agent)
        await check_idle(broker)
        restored = [e for e in broker.recorder.events() if isinstance(e, events.Restored)]
    assert [ends[agent].tokens for agent in range(6)] == replies
    # The part in common once, and what each has of its own, unless that is quicker computed.
    assert sum(event.tokens for event in restored) <= len(SHARED) + 6 * (OWN + 8)
    assert all(end.usage.ram_tokens + end.usage.cold_tokens >= len(SHARED) for end in ends.values())


async def test_running_rows_go_on_while_others_wait_for_the_disk(
    tmp_path: Path, hold: threading.Event
) -> None:
    await fill(tmp_path)
    async with tiny(cold=tmp_path) as broker:
        slow = broker.stream(asked(0))
        quick = await broker.complete(request(tokens=[*range(200, 230)], max_tokens=12))
        assert len(quick.tokens) == 12
        assert (await broker.statistics()).engine.requests.restoring == 1
        hold.set()
        seen = [event async for event in slow]
        await check_idle(broker)
    started, ended = seen[0], seen[-1]
    assert isinstance(started, Started)
    assert isinstance(ended, Completed)
    assert started.cold_tokens == len(SHARED) + OWN - 1


async def test_who_is_cancelled_while_the_disk_is_read_leaves_nothing(
    tmp_path: Path, hold: threading.Event
) -> None:
    replies = await fill(tmp_path)
    async with tiny(cold=tmp_path) as broker:
        async with broker.stream(asked(0)) as stream:
            await is_restoring(broker)
            stream.cancel()
            last = [event async for event in stream][-1]
        assert isinstance(last, Completed)
        assert last.finish_reason == "cancelled"
        hold.set()
        again = await broker.complete(asked(0))
        assert again.tokens == replies[0]
        await check_idle(broker)


async def test_closing_while_the_disk_is_read_waits_for_it(
    tmp_path: Path, hold: threading.Event
) -> None:
    await fill(tmp_path)
    async with tiny(cold=tmp_path) as broker:
        stream = broker.stream(asked(0))
        await is_restoring(broker)
        hold.set()
    with pytest.raises(BrokerClosed):
        await anext(stream)
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("mlx-swarm")]


async def test_a_corrupt_file_costs_the_hit_and_nothing_else(tmp_path: Path) -> None:
    replies = await fill(tmp_path)
    for file in files(tmp_path):
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)
    async with tiny(cold=tmp_path) as broker:
        again = [await broker.complete(asked(agent)) for agent in range(2)]
        await check_idle(broker)
    assert [reply.tokens for reply in again] == replies
    assert again[0].usage.cold_tokens == 0


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    with pytest.raises(InvalidSetting, match=r"taken is not a folder"):
        tiny(cold=taken)


async def test_a_reading_that_raises_serves_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies = await fill(tmp_path)

    def fail(engine: Any) -> None:
        def restore(match: object) -> None:
            raise OSError(5, "Input/output error")

        engine._cold.restore = restore

    async with tiny(cold=tmp_path) as broker:
        await inside(broker, fail)
        again = await broker.complete(asked(0))
        await check_idle(broker)
    assert again.tokens == replies[0]


def files(folder: Path) -> list[Path]:
    """What is stored."""
    return list(folder.rglob("*.safetensors"))


async def until(is_so: Callable[[], bool]) -> None:
    """Wait until something has happened in another thread."""
    with anyio.fail_after(20):
        while not is_so():  # noqa: ASYNC110 - nobody tells
            await anyio.sleep(0.01)


async def is_restoring(broker: Broker) -> None:
    """Wait until a request waits for the disk."""
    while not (await broker.statistics()).engine.requests.restoring:
        await anyio.lowlevel.checkpoint()
