"""The limit of the ledger is what the device has; rows run when their KV fits under it."""

from collections.abc import Mapping

import mlx.core as mx
import psutil
import pytest

from mlx_swarm.broker import Request
from mlx_swarm.broker.engine.memory import bounded_pool, device_limit, weight_bytes
from mlx_swarm.broker.errors import OutOfMemory
from tests.engine.driver import Driver, assert_greedy
from tests.engine.test_shared import model_of
from tests.tiny_broker import SHARED, prompt

GIB = 1 << 30


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

    monkeypatch.setattr(mx, "set_cache_limit", set_cache_limit)
    with bounded_pool(48 * GIB):
        assert limits[-1] == within
    assert limits[-1] == before


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
    memory = weight_bytes(model) + 2 * 80 * bytes_per_token
    driver = Driver(model, max_rows=8, memory=memory)
    asked = [Request(tokens=prompt(agent)[agent:], max_tokens=10) for agent in range(6)]
    boxes = [driver.submit(request) for request in asked]
    most = 0
    while driver.engine.turn():
        counts = driver.engine.statistics().requests
        most = max(most, counts.prefilling + counts.decoding)
        driver.engine.check_integrity()
        used = driver.engine.statistics().memory
        assert sum(used.committed.values()) + sum(used.reserved.values()) <= memory
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
