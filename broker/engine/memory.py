"""What the device has: the limit of a `Ledger`, so that nobody has to guess it."""

import mlx.core as mx
import psutil


def device_limit() -> int:
    """Bytes that this process may use on MLX's device, those that it uses already included.

    On a Mac that is the working set that Metal recommends, with CUDA what other processes leave,
    on a CPU what the system can hand out.
    """
    held = mx.get_active_memory() + mx.get_cache_memory()
    if mx.default_device() == mx.Device(mx.cpu):
        return int(psutil.virtual_memory().available) + held
    facts = mx.device_info()
    recommended = int(facts.get("max_recommended_working_set_size", 0))
    free = int(facts.get("free_memory", 0)) + held if "free_memory" in facts else 0
    total = int(facts.get("memory_size", 0)) or int(facts.get("total_memory", 0))
    return recommended or free or total or int(psutil.virtual_memory().available) + held
