"""What the system says about this process's memory. No MLX."""

import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

CGROUPS = Path("/sys/fs/cgroup")
CGROUP_OF_SELF = Path("/proc/self/cgroup")

RUSAGE_INFO_V0 = 0


class _Usage(ctypes.Structure):
    """`struct rusage_info_v0` of macOS's <sys/resource.h>."""

    _fields_ = [
        ("uuid", ctypes.c_uint8 * 16),
        ("user_time", ctypes.c_uint64),
        ("system_time", ctypes.c_uint64),
        ("package_idle_wakeups", ctypes.c_uint64),
        ("interrupt_wakeups", ctypes.c_uint64),
        ("pageins", ctypes.c_uint64),
        ("wired_size", ctypes.c_uint64),
        ("resident_size", ctypes.c_uint64),
        ("physical_footprint", ctypes.c_uint64),
        ("started", ctypes.c_uint64),
        ("exited", ctypes.c_uint64),
    ]


def footprint() -> int:
    """Bytes that this process takes: on macOS its physical footprint, else its resident set."""
    if sys.platform == "darwin":
        found = physical_footprint(ctypes.CDLL(None))
        if found:
            return found
    return int(_process(os.getpid()).memory_info().rss)


def physical_footprint(library: Any) -> int:
    """What Activity Monitor shows as memory, from macOS's libproc; 0 where it cannot be had.

    Unlike the resident set it has what was compressed or swapped, and no pages of files.
    """
    usage = _Usage()
    try:
        failed = library.proc_pid_rusage(os.getpid(), RUSAGE_INFO_V0, ctypes.byref(usage))
    except AttributeError:
        return 0
    return 0 if failed else int(usage.physical_footprint)


def available() -> int:
    """Bytes that this process could take in addition without others being swapped out.

    On Linux no more than the control groups (version 2) that it is in leave it.
    """
    free = int(psutil.virtual_memory().available)
    return max(0, min([free, *_left_in_cgroups()]))


@functools.cache
def _process(pid: int) -> psutil.Process:
    return psutil.Process(pid)


def _left_in_cgroups() -> Iterator[int]:
    """What each limited group has left; file pages that the kernel can drop count as free."""
    try:
        lines = CGROUP_OF_SELF.read_text().splitlines()
    except OSError:
        return
    inside = next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), None)
    if inside is None:
        return
    folder = CGROUPS / inside
    for group in (folder, *folder.parents):
        if not group.is_relative_to(CGROUPS):
            return
        try:
            limit = int((group / "memory.max").read_text())
            used = int((group / "memory.current").read_text())
            statistics = dict(map(str.split, (group / "memory.stat").read_text().splitlines()))
            yield limit - used + int(statistics["inactive_file"])
        except (OSError, ValueError, KeyError):  # "max", the root, or a system without
            continue
