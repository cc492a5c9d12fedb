"""Sessions, preemption, lanes, memory and the cold tier at the same time."""

import math
import threading
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mlx_swarm.broker import Completed, Request
from mlx_swarm.broker.cache.ssd.reader import Reader
from mlx_swarm.broker.engine.fairness import Party
from mlx_swarm.broker.engine.footprints import Trail
from mlx_swarm.broker.engine.memory import weight_bytes
from mlx_swarm.broker.engine.work import Admit, Decode, Expire, LanePolicy, Prefill, Work
from mlx_swarm.broker.errors import CacheError
from mlx_swarm.broker.models import load
from mlx_swarm.broker.request import RequestId
from tests.engine.driver import Driver, assert_greedy
from tests.engine.scheduling import FakeEngine, FakeLane
from tests.tiny_broker import TINY, check_idle, inside, tiny

SMALL = 40
"""Tokens of a slice in these tests."""

TOKEN_BYTES = 512
"""KV of a token of `TINY`."""


def driver_with_room_for(tokens: int, **settings: Any) -> Driver:
    model = load(TINY)
    return Driver(model, memory=weight_bytes(model) + tokens * TOKEN_BYTES, **settings)


def asked(token: int, prompt: int, output: int, **fields: Any) -> Request:
    return Request(tokens=[token] * prompt, max_tokens=output, **fields)


def test_who_has_memory_but_may_not_start_gives_it_back_to_who_may() -> None:
    """Else two wait for each other: one has the memory, the other is the next session."""
    driver = driver_with_room_for(200, ram=0, max_rows=1)
    scheduler = driver.engine.scheduler
    low = driver.submit(asked(5, 50, 50, cache=False))
    driver.run(4)
    waiter = driver.submit(asked(6, 50, 40, cache=False, priority=2))
    while not scheduler._pending._front:
        driver.run(1)
    # Its place was found, and before it gets that it is somebody else's turn.
    scheduler._may_start = lambda request: request != "request-1"
    other = driver.submit(asked(7, 100, 90, cache=False, priority=1))
    driver.run()
    assert other.end is not None
    assert low.end is not None
    scheduler._may_start = lambda request: True
    scheduler.memory_changed()
    driver.run()
    assert waiter.end is not None
    driver.check_idle()


def test_nobody_fails_for_what_is_only_pinned() -> None:
    driver = driver_with_room_for(220)
    kept = driver.submit(asked(5, 100, 4, agent="kept"))
    driver.run()
    assert driver.engine.sessions.pin(Party(agent="kept"), 60.0) == 104
    beside = driver.submit(asked(6, 20, 4))
    driver.run()
    assert driver.engine.cache.statistics().total.pinned_bytes > 0
    large = driver.submit(asked(7, 120, 50))
    driver.run()
    for box in (kept, beside, large):
        assert box.end is not None, box.error
    driver.check_idle()


@pytest.mark.anyio
async def test_nobody_fails_for_what_is_read_for_who_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go, read = threading.Event(), threading.Event(), Reader.read

    def wait(*arguments: Any) -> Any:
        begun.set()
        go.wait(20)
        return read(*arguments)

    prompt = [7] * 100
    async with tiny(cold=tmp_path) as broker:
        await broker.complete(Request(tokens=prompt, max_tokens=2))
        await broker.flush()
        room = weight_bytes(await inside(broker, lambda engine: engine.model)) + 220 * TOKEN_BYTES
    monkeypatch.setattr(Reader, "read", wait)
    async with tiny(cold=tmp_path, memory=room) as broker:
        cancelled = broker.stream(Request(tokens=prompt, max_tokens=2))
        await anyio.to_thread.run_sync(begun.wait)
        cancelled.cancel()
        large = broker.stream(Request(tokens=[9] * 150, max_tokens=50, cache=False))
        await inside(broker, lambda engine: engine.check_integrity())
        statistics = (await broker.statistics()).engine
        assert statistics.memory.reserved["restores"] > 0
        assert statistics.requests.queued == 1
        go.set()
        events = [event async for event in large]
        assert isinstance(events[-1], Completed)
        assert [event async for event in cancelled]
        await check_idle(broker)


class Busy(FakeEngine):
    """With a serial lane, and memory that is promised as rows' is; `slow` requests wait for the
    cold tier for some turns whenever they are admitted.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.serial = FakeLane(1, self.lane.chunk(False))
        self.serial.preempts = False
        self.promised: dict[RequestId, int] = {}
        self.granted: RequestId | None = None
        self.slow: set[RequestId] = set()
        self.reading: dict[RequestId, int] = {}
        self.read: set[RequestId] = set()

    def admit(self, request: RequestId) -> None:
        self.granted = None
        if request in self.slow and request not in self.read:
            self.reading[request] = len(self.log) + 5
            self.scheduler.restoring(request)
            return
        self.read.discard(request)
        super().admit(request)

    def turn(self) -> Work | None:
        work = super().turn()
        for request, at in list(self.reading.items()):
            if work is None or at <= len(self.log):
                del self.reading[request]
                self.read.add(request)
                self.scheduler.restored(request)
                work = work or Admit(request, False)
        return work

    def preempt(self, request: RequestId) -> None:
        super().preempt(request)
        self.promised.pop(request)

    def check_integrity(self) -> None:
        super().check_integrity()
        # One that starts next may have its memory before its row.
        running = self.positions.keys() | self.reading.keys() | self.read
        assert self.promised.keys() - running <= {self.granted}
        assert len(self.promised) <= 1 or sum(self.promised.values()) <= self.room

    def _end(self, request: RequestId, kept: Trail | None) -> None:
        self.promised.pop(request, None)
        self.reading.pop(request, None)
        self.read.discard(request)
        super()._end(request, kept)

    def _has_room(self, request: RequestId) -> bool:
        if self.granted is not None and self.granted != request:
            self.promised.pop(self.granted, None)
            self.granted = None
        if request not in self.promised:
            if self.promised and self._lack(request) > 0:
                return False
            self.promised[request] = self._need(request)
            self.granted = request
        return True

    def _shortage(self, request: RequestId) -> float:
        return 0.0 if request in self.promised else max(0, self._lack(request))

    def _lack(self, request: RequestId) -> int:
        return sum(self.promised.values()) + self._need(request) - self.room


class Life(NamedTuple):
    """A request of any kind, and how many turns come after it."""

    agent: str
    priority: int
    shared: int
    prompt: int
    output: int
    is_serial: bool
    is_cached: bool
    is_slow: bool
    deadline: float | None
    cancel_after: int | None
    hint: float | None
    turns: int


LIFE = st.builds(
    Life,
    agent=st.sampled_from(["", "a", "b", "c", "d"]),
    priority=st.integers(-1, 2),
    shared=st.sampled_from([0, 20, 50]),
    prompt=st.integers(1, 60),
    output=st.integers(1, 90),
    is_serial=st.sampled_from([False, False, True]),
    is_cached=st.sampled_from([True, True, False]),
    is_slow=st.sampled_from([False, False, True]),
    deadline=st.sampled_from([None, None, None, 5.0, 60.0]),
    cancel_after=st.sampled_from([None, None, None, 3, 40]),
    hint=st.sampled_from([None, 0.0, 3.0, math.inf]),
    turns=st.integers(0, 30),
)


def submit(engine: Busy, life: Life) -> RequestId:
    number = engine.submitted
    name = f"r{number}"
    if life.is_slow and life.is_cached:
        engine.slow.add(RequestId(name))
    return engine.submit(
        name,
        [*range(life.shared), *([1000 + number] * life.prompt)],
        namespace="shared" if life.is_cached else None,
        party=Party(agent=life.agent),
        priority=life.priority,
        output=life.output,
        lane=engine.serial if life.is_serial else None,
        deadline=life.deadline,
        hint=life.hint,
    )


ENGINES = st.fixed_dictionaries(
    {
        "max_rows": st.integers(1, 3),
        "turn_seconds": st.sampled_from([0.0, 0.2, 2.0]),
        "room": st.sampled_from([110, 160, 1 << 30]),
        "budget": st.sampled_from([60, 200, 400, math.inf]),
        "token_seconds": st.sampled_from([0.0, 0.05]),
        "lasting": st.booleans(),
        "refuses": st.booleans(),
        "slice_tokens": st.just(SMALL),
    }
)


@given(st.lists(LIFE, min_size=2, max_size=12), ENGINES)
@settings(max_examples=150, deadline=None, phases=[Phase.reuse, Phase.generate])
def test_with_everything_on_all_end_and_nothing_is_left(
    lives: list[Life], settings: dict[str, Any]
) -> None:
    engine = Busy(**settings)
    cancelled: set[RequestId] = set()
    due: list[tuple[int, RequestId]] = []

    def turn() -> bool:
        work = engine.turn()
        for at, request in list(due):
            if at <= len(engine.log):
                due.remove((at, request))
                if request in engine.prompts:
                    cancelled.add(request)
                    engine.cancel(request)
        if work is None and engine.prompts:
            soonest = min(
                engine.sessions.next_change(), engine.scheduler.next_deadline() or math.inf
            )
            assert soonest < math.inf, "nothing will ever happen"
            engine.now = max(engine.now, soonest)
        return bool(engine.prompts)

    requests = []
    for life in lives:
        requests.append(submit(engine, life))
        if life.cancel_after is not None:
            due.append((len(engine.log) + life.cancel_after, requests[-1]))
        for _ in range(life.turns):
            turn()
    while turn():
        pass
    expired = {work.request for work in engine.works(Expire)}
    for life, request in zip(lives, requests, strict=True):
        assert engine.decoded[request] == life.output or request in cancelled | expired
    scheduler = engine.scheduler
    assert (scheduler._accounts.size(), scheduler._accounts.open, scheduler.queued) == (0, 0, 0)
    assert not engine.promised
    assert engine.sessions.statistics().waiting == 0


@given(st.lists(LIFE, min_size=1, max_size=5), LIFE, ENGINES)
@settings(max_examples=40, deadline=None, phases=[Phase.reuse, Phase.generate])
def test_with_everything_on_nobody_starves_whatever_arrives(
    arrivals: list[Life], life: Life, settings: dict[str, Any]
) -> None:
    # Ends and waits take a turn too: with longer ones they would be all that is ever done.
    engine = Busy(**{**settings, "turn_seconds": 0.2})
    source = cycle(arrivals)

    def fill() -> None:
        while len(engine.prompts) < engine.lane.max_rows + 5:
            submit(engine, next(source))

    fill()
    victim = submit(engine, life._replace(agent="victim", deadline=None))
    for _ in range(20_000):
        fill()
        engine.turn()
        if victim not in engine.prompts:
            break
    assert victim not in engine.prompts


@pytest.mark.parametrize("end", ["cancelled", "deadline"])
def test_a_session_that_ends_while_it_is_preempted_keeps_its_place(end: str) -> None:
    now = [100.0]
    driver = Driver(load(TINY), max_rows=1, clock=lambda: now[0])
    deadline = 50.0 if end == "deadline" else None
    box = driver.submit(asked(5, 40, 60, agent="a", deadline=deadline))
    driver.decode_all([box], 10)
    driver.submit(asked(6, 20, 60, priority=1))
    while not driver.engine.scheduler.statistics().preempted:
        driver.run(1)
    if end == "deadline":
        now[0] += 60.0
    else:
        driver.cancel(0)
    driver.run(1)
    assert box.over
    party = Party(agent="a")
    last = driver.engine.sessions.policy.last(party)
    assert last is not None
    assert len(last) >= 40 + len(box.tokens) - 1
    assert last.tokens.tolist() == [*[5] * 40, *box.tokens][: len(last)]
    assert driver.engine.sessions.pin(party, 10.0) == len(last)
    driver.run()
    driver.check_idle()


def test_between_two_steps_of_a_lane_are_one_chunk_and_one_step_of_each_other() -> None:
    engine = FakeEngine(max_rows=20, prefill_chunk=16)
    lanes = [FakeLane(20, 16) for _ in range(4)] + [FakeLane(1, 16)]
    lanes[-1].preempts = False
    for number, lane in enumerate(lanes[:-1]):
        engine.submit(f"ends{number}", [50 + number] * 5, lane=lane, output=20 + 7 * number)
    while len(engine.works(Decode)) < 8:
        engine.turn()
    for number, lane in reversed([*enumerate(lanes)]):
        engine.submit(f"runs{number}", [number] * 5, lane=lane, output=300)
    while len(engine.works(Decode)) < 8 + 2 * len(lanes):
        engine.turn()
    coming = [
        engine.submit(f"comes{number}{size}", [100 + number] * size, lane=lane, output=300)
        for number, lane in enumerate(lanes[:-1])
        for size in (10, 200)
    ]
    since: dict[LanePolicy, list[int]] = {lane: [0, 0] for lane in lanes}
    while any(engine.decoded[request] < 3 for request in coming):
        work = engine.turn()
        for gap in since.values():
            if isinstance(work, Prefill):
                gap[0] += sum(part.stop - part.start for part in work.parts)
            gap[1] += isinstance(work, Decode)
        if isinstance(work, Decode):
            assert since[work.lane][0] <= 16
            assert since[work.lane][1] <= len(lanes)
            since[work.lane] = [0, 0]
    assert all(f"runs{number}" in engine.prompts for number in range(len(lanes)))
    engine.drain()


@pytest.mark.parametrize("max_rows", [4, 64])
def test_sixty_four_at_once_with_the_cache_full_never_stall(max_rows: int) -> None:
    now = [100.0]

    def pass_on(seconds: float) -> None:
        now[0] += seconds + 0.01

    ram = 600 * TOKEN_BYTES
    driver = driver_with_room_for(
        640, ram=ram, max_rows=max_rows, clock=lambda: now[0], sleep=pass_on
    )
    driver.engine.scheduler._slice = 16
    for agent in range(5):
        driver.submit(asked(agent, 100, 20, agent=f"old{agent}"))
    driver.run()
    for agent in range(5):
        with suppress(CacheError):
            driver.engine.sessions.pin(Party(agent=f"old{agent}"), 1000.0)
    assert driver.engine.cache.statistics().total.pinned_bytes > ram // 3
    requests = [
        asked(
            10 + number,
            40 + number % 50,
            10 + number % 40,
            agent=f"agent{number % 20}",
            priority=number % 3,
            deterministic=number % 16 == 0,
        )
        for number in range(64)
    ]
    boxes = driver.stagger(requests, lambda: 2)
    for request, box in zip(requests, boxes, strict=True):
        assert box.end is not None, box.error
        assert_greedy(driver.engine.model, request.tokens, box.tokens)
    driver.check_idle()
