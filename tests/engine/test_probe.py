"""What the system says about memory: parts that stand for those of other systems."""

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
import pytest

from mlx_swarm.broker.backend import Backend
from mlx_swarm.broker.engine import footprint as system
from mlx_swarm.broker.engine import probe
from mlx_swarm.broker.engine.probe import MemoryProbe, empty_pool, wired

GIB = 1 << 30


class LibProc:
    """Stands for macOS's library; the fields are those of `struct rusage_info_v0`."""

    def __init__(self, status: int = 0) -> None:
        self.status = status

    def proc_pid_rusage(self, pid: int, flavour: int, reference: Any) -> int:
        assert (pid, flavour) == (os.getpid(), 0)
        # 16 bytes of a UUID, then ten counters of 64 bits, of which the eighth is wanted.
        assert ctypes.sizeof(reference._obj) == 16 + 10 * 8
        counters = (ctypes.c_uint64 * 12).from_buffer(reference._obj)
        counters[2 + 6], counters[2 + 7] = 5 * GIB, 7 * GIB
        return self.status


def test_on_macos_it_is_the_physical_footprint(monkeypatch: pytest.MonkeyPatch) -> None:
    assert system.physical_footprint(LibProc()) == 7 * GIB
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: LibProc())
    assert system.footprint() == 7 * GIB


@pytest.mark.parametrize("library", [LibProc(status=-1), object()])
def test_where_that_cannot_be_had_it_is_the_resident_set(
    monkeypatch: pytest.MonkeyPatch, library: object
) -> None:
    assert system.physical_footprint(library) == 0
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert system.footprint() > 1 << 20


def test_elsewhere_it_is_the_resident_set() -> None:
    before = system.footprint()
    held = bytearray(os.urandom(1)) * (64 << 20)
    assert system.footprint() >= before + len(held) // 2


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Control groups of a process in /outer/inner, where nothing is limited yet."""
    inner = tmp_path / "groups" / "outer" / "inner"
    inner.mkdir(parents=True)
    mine = tmp_path / "cgroup"
    mine.write_text("1:name=systemd:/elsewhere\n0::/outer/inner\n")
    monkeypatch.setattr(system, "CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(system, "CGROUP_OF_SELF", mine)
    return inner


def limit(group: Path, limit: str, used: int, inactive: int) -> None:
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")


def test_a_container_has_what_the_tightest_of_its_groups_leaves(cgroups: Path) -> None:
    limit(cgroups, "max", 1_000, 100)
    assert system.available() > 1 << 20
    limit(cgroups.parent, "5000", 4_500, 200)
    assert system.available() == 700
    limit(cgroups, "1200", 1_000, 100)
    assert system.available() == 300
    limit(cgroups, "900", 1_000, 0)
    assert system.available() == 0


def test_without_control_groups_it_is_what_the_system_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "CGROUP_OF_SELF", tmp_path / "none")
    assert 0 < system.available() < psutil.virtual_memory().total


def on(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that MLX computes there: 3 GiB in use, 1 GiB kept, a footprint of 6 GiB."""
    facts = {"max_recommended_working_set_size": 48 * GIB} if device == "metal" else {}
    monkeypatch.setattr(probe, "describe", lambda: Backend(device, "", "0"))
    monkeypatch.setattr(mx, "device_info", lambda: facts)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 3 * GIB)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: GIB)
    monkeypatch.setattr(probe, "device_limit", lambda: 48 * GIB)
    monkeypatch.setattr(probe, "footprint", lambda: 6 * GIB)
    monkeypatch.setattr(probe, "available", lambda: 10 * GIB)


@pytest.mark.parametrize(
    ("device", "footprint", "limit"), [("metal", 6, 48), ("cuda", 4, 48), ("cpu", 6, 16)]
)
def test_each_device_has_its_numbers(
    monkeypatch: pytest.MonkeyPatch, device: str, footprint: int, limit: int
) -> None:
    on(device, monkeypatch)
    assert MemoryProbe()() == (3 * GIB, GIB, footprint * GIB, limit * GIB)


def test_emptying_the_pool_gives_memory_back_to_the_system() -> None:
    # Once so much was freed, glibc no longer gives back what is smaller.
    mx.eval(mx.ones((6 << 20,)))
    mx.clear_cache()
    arrays = [mx.ones((1 << 18,)) for _ in range(200)]
    mx.eval(arrays)
    full = system.footprint()
    # What is left is spread over all of it.
    del arrays[1::2], arrays[1::2]
    empty_pool()
    assert mx.get_cache_memory() == 0
    if mx.default_device() == mx.Device(mx.cpu):
        assert full - system.footprint() > 100 << 20


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The wired limits set, the one of before first."""
    found = [7]

    def set_wired_limit(limit: int) -> int:
        found.append(limit)
        return found[-2]

    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    return found


def test_metal_keeps_resident_what_it_recommends_until_the_last_engine_closes(
    monkeypatch: pytest.MonkeyPatch, limits: list[int]
) -> None:
    on("metal", monkeypatch)
    first, second = wired(), wired()
    assert first.__enter__() == second.__enter__() == 48 * GIB
    first.__exit__(None, None, None)
    assert limits == [7, 48 * GIB]
    second.__exit__(None, None, None)
    assert limits == [7, 48 * GIB, 7]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_elsewhere_nothing_is_wired(
    monkeypatch: pytest.MonkeyPatch, limits: list[int], device: str
) -> None:
    on(device, monkeypatch)
    with wired() as limit:
        assert limit == 0
    assert limits == [7]
