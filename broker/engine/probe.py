"""Memory pressure on MLX's device: what is read, MLX's pool, and Metal's wired limit."""

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from ..backend import describe
from .footprint import available, footprint
from .memory import device_limit
from .pressure import Reading


class MemoryProbe:
    """Reads what the process has and may have.

    On a CPU the limit moves with what others leave. A GPU's is that of the beginning: what a driver
    calls free lacks what it keeps for this very process. With CUDA the footprint is MLX's own, for
    the host's memory is another.
    """

    def __init__(self) -> None:
        self._device = describe().device
        self._limit = device_limit()

    def __call__(self) -> Reading:
        active, pool = mx.get_active_memory(), mx.get_cache_memory()
        if self._device == "cuda":
            return Reading(active, pool, active + pool, self._limit)
        taken = footprint()
        if self._device == "metal":
            return Reading(active, pool, taken, self._limit)
        return Reading(active, pool, taken, max(active + pool, taken) + available())


def empty_pool() -> None:
    """Give what MLX keeps for later back to the system.

    MLX's CPU build has its memory from glibc, which keeps nearly all that is freed in pieces under
    32 MiB, and does not say so.
    """
    mx.clear_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


class _Wiring:
    """The engines of this process that want memory wired: the first sets the limit, the last one
    restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = 0

    def enter(self, limit: int) -> None:
        with self._lock:
            if not self._users:
                self._before = mx.set_wired_limit(limit)
            self._users += 1

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                # As MLX wants it: not while anything is being computed.
                mx.synchronize()
                mx.set_wired_limit(self._before)


_wiring = _Wiring()


@contextmanager
def wired() -> Iterator[int]:
    """Let Metal keep resident as much as it recommends, like mlx-lm; yields that many bytes.

    Else weights and KV that were not used for a moment have to be made resident again. Only where
    it is asked for: with it macOS has panicked under concurrent requests whose KV is evicted
    (ml-explore/mlx#3186). Does nothing and yields 0 on other devices.
    """
    limit = 0
    if describe().device == "metal":
        limit = int(mx.device_info().get("max_recommended_working_set_size", 0))
    if not limit:
        yield 0
        return
    _wiring.enter(limit)
    try:
        yield limit
    finally:
        _wiring.leave()
