"""The limit of the ledger is what the device has; rows run when their KV fits under it."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import psutil
import pytest

from mlx_swarm.broker import Request
from mlx_swarm.broker.cache.ledger import Purpose
from mlx_swarm.broker.engine import memory, sharing
from mlx_swarm.broker.engine.kernels.launch import MAX_SPANS
from mlx_swarm.broker.engine.memory import (
    RowMemory,
    bounded_pool,
    device_limit,
    weight_bytes,
)
from mlx_swarm.broker.engine.row import Row
from mlx_swarm.broker.errors import OutOfMemory
from tests.engine.driver import Box, Driver, assert_greedy
from tests.engine.test_shared import KINDS, model_of
from tests.tiny_broker import SHARED, prompt, reference

GIB = 1 << 30
LONGER = KINDS["llama"].replace("context=512", "context=1024")


def test_on_a_cpu_it_is_what_the_system_can_hand_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    limit = device_limit()
    assert 0 < limit < psutil.virtual_memory().total + mx.get_active_memory() + GIB


@pytest.mark.parametrize(("before", "within"), [(64 * GIB, 3 * GIB), (GIB, GIB)])
def test_the_pool_is_bounded_while_a_broker_lives_and_never_widened(
    monkeypatch: pytest.MonkeyPatch, before: int, within: int
) -> None:
    limits = [before]

    def set_cache_limit(limit: int) -> int:
        limits.append(limit)
        return limits[-2]

    # Engines that other tests have not closed are no concern of this one.
    monkeypatch.setattr(memory, "_pool", memory.PoolBounds())
    monkeypatch.setattr(mx, "set_cache_limit", set_cache_limit)
    with bounded_pool(48 * GIB):
        assert limits[-1] == within
    assert limits[-1] == before


@pytest.mark.parametrize("first_to_close", [0, 1])
def test_the_pool_is_bounded_until_the_last_broker_is_closed(
    monkeypatch: pytest.MonkeyPatch, first_to_close: int
) -> None:
    limits = [64 * GIB]

    def set_cache_limit(limit: int) -> int:
        limits.append(limit)
        return limits[-2]

    # Engines that other tests have not closed are no concern of this one.
    monkeypatch.setattr(memory, "_pool", memory.PoolBounds())
    monkeypatch.setattr(mx, "set_cache_limit", set_cache_limit)
    pools = [bounded_pool(48 * GIB), bounded_pool(32 * GIB)]
    for pool in pools:
        pool.__enter__()
    assert limits[-1] == 2 * GIB
    pools.pop(first_to_close).__exit__(None, None, None)
    assert limits[-1] == (2 * GIB, 3 * GIB)[first_to_close]
    pools.pop().__exit__(None, None, None)
    assert limits[-1] == 64 * GIB


@pytest.mark.parametrize(
    ("facts", "limit"),
    [
        ({"max_recommended_working_set_size": 48 * GIB, "memory_size": 64 * GIB}, 48 * GIB),
        ({"free_memory": 100 * GIB, "total_memory": 139 * GIB}, 103 * GIB),
        ({"total_memory": 139 * GIB}, 139 * GIB),
    ],
)
def test_on_a_gpu_it_is_what_the_driver_says(
    monkeypatch: pytest.MonkeyPatch, facts: Mapping[str, int], limit: int
) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda: facts)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 2 * GIB)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: GIB)
    assert device_limit() == limit


def test_rows_wait_for_memory_in_their_order_and_all_are_served() -> None:
    model = model_of("llama")
    bytes_per_token = 3 * 2 * 2 * 16 * 4
    # Two rows of 66 prompt and 10 new tokens at a time, and not much of a cache beside them.
    limit = weight_bytes(model) + 2 * 80 * bytes_per_token
    driver = Driver(model, max_rows=8, memory=limit)
    asked = [Request(tokens=prompt(agent)[agent:], max_tokens=10) for agent in range(6)]
    boxes = [driver.submit(request) for request in asked]
    most = 0
    while driver.engine.turn():
        counts = driver.engine.statistics().requests
        most = max(most, counts.prefilling + counts.decoding)
        driver.engine.check_integrity()
        used = driver.engine.statistics().memory
        assert sum(used.committed.values()) + sum(used.reserved.values()) <= limit
    assert 1 <= most < 6
    for request, box in zip(asked, boxes, strict=True):
        assert len(box.tokens) == 10
        assert_greedy(model, request.tokens, box.tokens)
    driver.check_idle()


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    model = model_of("llama")
    driver = Driver(model, memory=weight_bytes(model) + 40_000)
    refused = driver.submit(Request(tokens=prompt(0), max_tokens=300))
    served = driver.submit(Request(tokens=SHARED[:8], max_tokens=4))
    driver.run()
    assert isinstance(refused.error, OutOfMemory)
    assert "66 prompt tokens and up to 300 new ones need 274.5 KiB" in str(refused.error)
    assert served.end is not None
    driver.check_idle()


def families(count: int, length: int) -> list[Request]:
    """Requests that have nothing in common, longer than what is copied without need."""
    return [
        Request(tokens=[*((7 * at + 31 * n) % 250 for at in range(length)), 9], max_tokens=120)
        for n in range(count)
    ]


@pytest.mark.parametrize("copies", [0, 1, 3])
def test_what_no_span_serves_is_copied_only_into_memory_that_there_is(copies: int) -> None:
    model = model_of(LONGER)
    asked = families(11, 520)
    token = 3 * 2 * 2 * 16 * 4
    whole, own = 521 * token, 121 * token
    # Everybody's prompt in the cache, everybody's output, and the copies of some prompts.
    limit = weight_bytes(model) + 11 * (whole + own) + copies * whole + whole // 2
    driver = Driver(model, ram=12 * whole, max_rows=11, chunk=512, memory=limit)
    boxes = [driver.submit(each) for each in asked]
    while driver.engine.turn():
        driver.engine.check_integrity()
    for request, box in zip(asked, boxes, strict=True):
        assert_greedy(model, request.tokens, box.tokens)
    driver.check_idle()


def test_without_memory_for_copies_there_are_more_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowMemory, "afford", lambda *_: False)
    model = model_of(LONGER)
    driver, asked = Driver(model, max_rows=11, chunk=512), families(11, 520)
    boxes = [driver.submit(each) for each in asked]
    driver.decode_all(boxes, 2)
    batch = driver.engine.statistics().lane.batch
    assert batch.spans == batch.rows == driver.engine.cache.statistics().leases > MAX_SPANS
    driver.run()
    for request, box in zip(asked, boxes, strict=True):
        assert_greedy(model, request.tokens, box.tokens)
    driver.check_idle()


def test_what_was_copied_is_pinned_no_longer() -> None:
    model = model_of(LONGER)
    driver = Driver(model, max_rows=11, chunk=512)
    boxes = [driver.submit(each) for each in families(11, 520)]
    driver.decode_all(boxes, 2)
    batch = driver.engine.statistics().lane.batch
    assert batch.spans == driver.engine.cache.statistics().leases == MAX_SPANS < batch.rows
    driver.run()
    driver.check_idle()


def test_a_lease_is_not_shortened_to_other_extents_than_the_row_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cache was cleared, and what two rows read was stored once more by others."""
    monkeypatch.setattr(sharing, "LEAST_OWN_SPAN", 16)
    model = model_of("llama")
    driver = Driver(model, chunk=128)
    decoder: Any = driver.engine.lane._shared
    decoder._batch._placement._max_spans = 3

    def ask(family: int) -> Box:
        tokens = [*SHARED, *(40 * family + at for at in range(30)), 9]
        asked.append(Request(tokens=tokens, max_tokens=40, boundaries=(len(SHARED), 90)))
        return driver.submit(asked[-1])

    asked: list[Request] = []
    boxes = [ask(0), ask(1)]
    driver.decode_all(boxes, 2)
    driver.engine.cache.clear()
    boxes += [ask(2), ask(2)]
    while driver.engine.turn():
        driver.engine.check_integrity()
    for request, box in zip(asked, boxes, strict=True):
        assert box.error is None
        assert_greedy(model, request.tokens, box.tokens)
    driver.check_idle()


def test_who_is_not_copied_after_all_is_promised_nothing_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two families that end in parts too short for a span; for one row there is no memory."""
    monkeypatch.setattr(sharing, "LEAST_OWN_SPAN", 16)
    afford = RowMemory.afford

    def refusing(memory: RowMemory, row: Row, known: int) -> bool:
        assert row.memory is not None
        is_more = memory._need(row, known) > row.memory.remaining
        return not (is_more and row.id == "request-3") and afford(memory, row, known)

    monkeypatch.setattr(RowMemory, "afford", refusing)
    model = model_of("llama")
    driver = Driver(model, chunk=128)
    decoder: Any = driver.engine.lane._shared
    decoder._batch._placement._max_spans = 1
    asked = [
        Request(
            tokens=[*((family + 7 * at) % 250 for at in range(50)), 9, 9],
            max_tokens=20,
            boundaries=(40, 50),
        )
        for family in (0, 0, 1, 1)
    ]
    boxes = [driver.submit(each) for each in asked]
    while driver.engine.turn():
        driver.engine.check_integrity()
    for request, box in zip(asked, boxes, strict=True):
        assert box.tokens == list(reference(model, request.tokens, 20))
    driver.check_idle()


def test_a_row_that_needs_no_more_is_never_refused() -> None:
    model = model_of("llama")
    driver = Driver(model, memory=weight_bytes(model) + 1_000_000)
    box = driver.submit(Request(tokens=prompt(0), max_tokens=10))
    driver.run(1)
    # What is there is charged above the limit: another thread's, for one.
    driver.engine.ledger.charge(Purpose.SPILLS, 1_000_000)
    driver.run()
    assert box.tokens == list(reference(model, prompt(0), 10))
    driver.check_idle()


def test_nothing_is_evicted_for_a_row_that_has_to_wait_all_the_same() -> None:
    model = model_of("llama")
    driver = Driver(model, memory=weight_bytes(model) + 150 * 3 * 2 * 2 * 16 * 4)
    driver.submit(Request(tokens=SHARED[:20], max_tokens=1))
    driver.run()
    kept = driver.engine.cache.total_bytes
    running = driver.submit(Request(tokens=[3] * 10, max_tokens=90))
    driver.decode_all([running], 2)
    waiting = driver.submit(Request(tokens=[5] * 60, max_tokens=60))
    driver.run(5)
    assert driver.engine.scheduler.statistics().queued == 1
    assert driver.engine.cache.total_bytes == kept > 0
    driver.run()
    assert running.tokens == list(reference(model, [3] * 10, 90))
    assert waiting.tokens == list(reference(model, [5] * 60, 60))
    driver.check_idle()
