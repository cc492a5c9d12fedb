"""An engine on a machine whose memory runs short and recovers: nobody fails, all is as without."""

import contextlib
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from mlx_swarm.broker import Completed, Request
from mlx_swarm.broker.cache.ledger import Purpose
from mlx_swarm.broker.engine import loop, pressure, relief
from mlx_swarm.broker.engine.memory import weight_bytes
from mlx_swarm.broker.engine.pressure import Reading
from mlx_swarm.broker.engine.relief import Relief
from mlx_swarm.broker.errors import OutOfMemory
from mlx_swarm.broker.trace import events
from tests.engine.driver import Box, Driver, assert_greedy
from tests.engine.test_memory import LONGER, families
from tests.engine.test_restoring import asked as restored_later
from tests.engine.test_restoring import fill
from tests.engine.test_shared import model_of
from tests.tiny_broker import check_idle, prompt, tiny

pytestmark = pytest.mark.anyio

LIMIT = 1 << 40


class Machine:
    """Stands for the probe; `share` of all memory is taken, whatever is done about it."""

    share = 0.5

    def __call__(self) -> Reading:
        return Reading(0, 0, int(self.share * LIMIT), LIMIT)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The machine of all engines made in the test; they check it at every turn."""
    made = Machine()
    monkeypatch.setattr(relief, "MemoryProbe", lambda: made)
    monkeypatch.setattr(pressure, "INTERVAL", 0.0)
    monkeypatch.setattr(pressure, "SETTLE_SECONDS", 0.0)
    return made


def asked(count: int, max_tokens: int = 12) -> list[Request]:
    return [Request(tokens=prompt(agent), max_tokens=max_tokens) for agent in range(count)]


def running(driver: Driver) -> int:
    counts = driver.engine.statistics().requests
    return counts.restoring + counts.prefilling + counts.decoding


def check_served(driver: Driver, requests: list[Request], boxes: list[Box]) -> None:
    for request, box in zip(requests, boxes, strict=True):
        assert box.end is not None
        assert len(box.tokens) == request.max_tokens or box.end.finish_reason == "stop"
        assert_greedy(driver.engine.model, request.tokens, box.tokens)
    driver.check_idle()


@pytest.mark.parametrize("share", [0.92, 0.99, 2.0])
def test_under_pressure_requests_run_one_at_a_time_and_all_are_served(
    machine: Machine, share: float
) -> None:
    machine.share = share
    driver, requests = Driver(model_of("llama")), asked(5)
    boxes = [driver.submit(each) for each in requests]
    while driver.engine.turn():
        driver.engine.check_integrity()
        assert running(driver) <= 1
    check_served(driver, requests, boxes)


def test_rows_that_run_go_on_nobody_joins_and_admission_resumes_by_itself(
    machine: Machine,
) -> None:
    driver, requests = Driver(model_of("llama")), asked(6, max_tokens=24)
    first = [driver.submit(each) for each in requests[:2]]
    driver.decode_all(first, 2)
    machine.share = 0.93
    later = [driver.submit(each) for each in requests[2:]]
    driver.decode_all(first, 8)
    assert running(driver) == 2
    assert driver.engine.statistics().requests.queued == 4
    machine.share = 0.87
    driver.decode_all(first, 10)
    assert running(driver) == 2
    machine.share = 0.84
    driver.decode_all(later, 1)
    assert running(driver) == 6
    driver.run()
    check_served(driver, requests, [*first, *later])
    told = [e for e in driver.engine._recorder.events() if isinstance(e, events.Pressure)]
    assert [(each.before, each.level) for each in told] == [("normal", "soft"), ("soft", "normal")]
    assert [each.footprint for each in told] == [int(0.93 * LIMIT), int(0.84 * LIMIT)]
    assert {each.limit for each in told} == {LIMIT}


def test_the_cache_gives_up_what_nothing_that_runs_reads(machine: Machine) -> None:
    # Too long for the running row to copy.
    first = families(3, 520)
    driver, requests = Driver(model_of(LONGER), chunk=512), [*first, first[2]]
    for request in first:
        driver.submit(request)
    driver.run()
    full = driver.engine.cache.total_bytes
    last = driver.submit(first[2])
    driver.decode_all([last], 1)
    machine.share = 0.97
    driver.decode_all([last], 4)
    assert driver.engine.cache.statistics().leases == 1
    assert 0 < driver.engine.cache.total_bytes < full / 2
    driver.run()
    check_served(driver, requests, driver.boxes)
    machine.share = 0.5
    again = driver.submit(requests[0])
    driver.run()
    assert again.tokens == driver.boxes[0].tokens


def test_with_a_cold_tier_what_leaves_memory_is_read_back(machine: Machine, tmp_path: Path) -> None:
    driver, requests = Driver(model_of("llama"), cold=tmp_path), asked(3)
    for request in requests:
        driver.submit(request)
    driver.run()
    machine.share = 0.93
    # A turn each time that a write may have ended.
    for _ in itertools.count():
        driver.engine.turn()
        driver.engine.flush(10)
        if not driver.engine.cache.total_bytes:
            break
    assert driver.engine.cache.demotions
    machine.share = 0.5
    again = driver.submit(requests[0])
    driver.run()
    assert again.tokens == driver.boxes[0].tokens
    assert again.end is not None
    assert again.end.usage.cold_tokens
    driver.check_idle()
    driver.engine.close()


def test_any_rise_and_fall_leaves_tokens_and_accounts_as_they_are(machine: Machine) -> None:
    driver, requests = Driver(model_of("gemma3_text")), asked(12, max_tokens=16)
    shares = itertools.cycle([0.5, 0.91, 0.88, 0.95, 0.97, 1.2, 0.92, 0.86, 0.84])
    waiting = iter(requests)
    boxes = []
    for turn in itertools.count():
        if turn % 4 == 0:
            machine.share = next(shares)
        if turn % 6 == 0 and (request := next(waiting, None)) is not None:
            boxes.append(driver.submit(request))
        did = driver.engine.turn()
        driver.engine.check_integrity()
        if not did and len(boxes) == len(requests):
            break
    check_served(driver, requests, boxes)
    driver.engine.close()
    assert driver.engine.ledger.statistics().committed["extents"] == 0


def test_at_the_hard_level_rows_go_but_one_and_come_back_with_what_they_had(
    machine: Machine,
) -> None:
    driver, requests = Driver(model_of("llama"), ram=0), asked(4, max_tokens=24)
    boxes = [driver.submit(each) for each in requests]
    driver.decode_all(boxes, 4)
    machine.share = 1.2
    driver.run(1)
    driver.engine.check_integrity()
    assert running(driver) == 1
    driver.run(3)
    assert running(driver) == 1
    left = [e for e in driver.recorder.events() if isinstance(e, events.Preempted)]
    assert [(each.request, each.by, each.reason) for each in left] == [
        (f"request-{number}", "", "memory") for number in (3, 2, 1)
    ]
    machine.share = 0.5
    driver.run()
    check_served(driver, requests, boxes)
    driver.engine.close()


def test_at_the_hard_level_no_more_rows_go_than_free_what_is_too_much(machine: Machine) -> None:
    driver, requests = Driver(model_of("llama"), ram=0), asked(4, max_tokens=24)
    boxes = [driver.submit(each) for each in requests]
    driver.decode_all(boxes, 4)
    each = driver.engine.ledger.used(Purpose.TAILS) // 4
    driver.engine.relief.preempt(each + 1)
    assert running(driver) == 2
    driver.engine.relief.preempt(1 << 40)
    assert running(driver) == 1
    driver.run()
    check_served(driver, requests, boxes)
    driver.engine.close()


def test_what_can_never_fit_is_refused_under_pressure_as_ever(machine: Machine) -> None:
    machine.share = 0.99
    model = model_of("llama")
    driver = Driver(model, memory=weight_bytes(model) + 40_000)
    refused = driver.submit(Request(tokens=prompt(0), max_tokens=300))
    served = driver.submit(Request(tokens=prompt(1)[:8], max_tokens=4))
    driver.run()
    assert isinstance(refused.error, OutOfMemory)
    assert served.end is not None


def test_a_probe_that_fails_ends_nobody_s_request(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(self: Machine) -> Reading:
        raise OSError("no such file")

    driver, requests = Driver(model_of("llama")), asked(2, max_tokens=2)
    monkeypatch.setattr(Machine, "__call__", failing)
    boxes = [driver.submit(each) for each in requests]
    driver.run()
    assert "memory was not given back" in caplog.text
    monkeypatch.undo()
    check_served(driver, requests, boxes)


def test_rows_are_asked_for_only_once_the_cache_is_empty(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    monkeypatch.setattr(
        Relief, "preempt", lambda self, nbytes: left.append(self._cache.total_bytes)
    )
    driver, requests = Driver(model_of("llama")), asked(3)
    driver.submit(requests[0])
    driver.run()
    machine.share = 0.99
    box = driver.submit(Request(tokens=[9, 8, 7, 6], max_tokens=8))
    driver.run()
    assert box.end is not None
    assert left
    assert left[0] == 0


@pytest.mark.parametrize("asked_for", [True, False])
async def test_statistics_tell_the_numbers_and_what_is_wired(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, asked_for: bool
) -> None:
    ended: list[int] = []

    @contextlib.contextmanager
    def wired() -> Iterator[int]:
        yield 77
        ended.append(77)

    monkeypatch.setattr(loop, "wired", wired)
    async with tiny(wired=asked_for) as broker:
        told = (await broker.statistics()).engine.pressure
        assert not ended
    assert (told.level, told.footprint, told.limit) == ("normal", LIMIT // 2, LIMIT)
    assert told.wired_limit == 77 * asked_for
    assert ended == [77] * asked_for


async def test_who_waits_for_the_disk_when_memory_runs_short_is_served_too(
    machine: Machine, tmp_path: Path, hold: threading.Event
) -> None:
    replies = await fill(tmp_path, agents=3)
    ends: dict[int, Completed] = {}
    async with tiny(cold=tmp_path) as broker:

        async def run(agent: int) -> None:
            ends[agent] = await broker.complete(restored_later(agent))

        async with anyio.create_task_group() as group:
            for agent in range(3):
                group.start_soon(run, agent)
            while (await broker.statistics()).engine.requests.restoring < 3:
                await anyio.lowlevel.checkpoint()
            machine.share = 0.99
            hold.set()
        await check_idle(broker)
        assert (await broker.statistics()).engine.pressure.level == "hard"
    assert [ends[agent].tokens for agent in range(3)] == replies
