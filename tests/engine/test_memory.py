"""The limit of the ledger is what the device has."""

from collections.abc import Mapping

import mlx.core as mx
import psutil
import pytest

from mlx_swarm.broker.engine.memory import device_limit

GIB = 1 << 30


def test_on_a_cpu_it_is_what_the_system_can_hand_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    limit = device_limit()
    assert 0 < limit < psutil.virtual_memory().total + mx.get_active_memory() + GIB


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
