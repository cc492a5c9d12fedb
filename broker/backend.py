"""Which MLX this process runs on, and the BLAS that its CPU build needs.

MLX's CPU wheel for Linux links a single-threaded reference BLAS. A real BLAS that is in the global
symbol scope before `import mlx` takes its place (20 to 100 times the matrix throughput), so this
module is imported before anything that imports MLX.
"""

import ctypes
import ctypes.util
import importlib.util
import logging
import os
import sys
from importlib import metadata
from typing import NamedTuple

from .errors import BackendMissing

BLAS_VARIABLE = "MLX_SWARM_BLAS"
BLAS_NAMES = ("libopenblas.so.0", "libopenblas.so")
BLAS_HINT = (
    "MLX runs on its slow built-in BLAS here: install OpenBLAS "
    "(`apt install libopenblas0`) for about 20 times the prompt speed and 8 times the batch speed"
)

_log = logging.getLogger(__name__)


class Backend(NamedTuple):
    """What MLX computes on: `device` is metal, cuda or cpu; `blas` is set on the CPU only."""

    device: str
    blas: str
    mlx_version: str

    @property
    def is_slow(self) -> bool:
        """Whether this is MLX's CPU build on its reference BLAS."""
        return self.device == "cpu" and self.blas == "reference"


def load_blas() -> str:
    """Put a fast BLAS under MLX's CPU build; return its library name, or "" if none was loaded.

    Does nothing on a Mac, on CUDA, without MLX, or when MLX is imported already.
    `MLX_SWARM_BLAS` names a library to use instead, or `off`; one that cannot be loaded is warned
    of, and nothing else takes its place.
    """
    choice = os.environ.get(BLAS_VARIABLE, "")
    if sys.platform != "linux" or choice == "off" or "mlx.core" in sys.modules:
        return ""
    if not _installed("mlx-cpu"):
        return ""
    for name in (choice,) if choice else BLAS_NAMES:
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            if choice:
                _log.warning("%s=%s is not used: %s", BLAS_VARIABLE, choice, error)
            continue
        return name
    return ""


def require_mlx() -> None:
    """Raise `BackendMissing`, naming the extra to install, unless MLX can be imported."""
    if importlib.util.find_spec("mlx") is not None and importlib.util.find_spec("mlx.core"):
        return
    if sys.platform == "darwin":
        raise BackendMissing("MLX is not installed: run `pip install mlx`")
    raise BackendMissing(
        "MLX is not installed: run `pip install 'mlx-swarm[cpu]'` on a machine without an NVIDIA "
        "GPU, `pip install 'mlx-swarm[cuda13]'` (or cuda12) with one"
    )


def describe() -> Backend:
    """The backend of this process; imports MLX."""
    import mlx.core as mx

    device = "cpu"
    if mx.default_device() == mx.Device(mx.gpu, 0):
        device = "metal" if mx.metal.is_available() else "cuda"
    blas = (LOADED_BLAS or "reference") if device == "cpu" and sys.platform == "linux" else ""
    return Backend(device, blas, metadata.version("mlx"))


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


LOADED_BLAS = load_blas()

# MLX's CUDA build keeps what it prepares for a shape: 400 graphs and 256 attention plans. It fails
# for good once it has prepared twice as many in its life, which every server comes to.
os.environ.setdefault("MLX_CUDA_GRAPH_CACHE_SIZE", "4096")
os.environ.setdefault("MLX_CUDA_SDPA_CACHE_SIZE", "4096")
os.environ.setdefault("MLX_ENABLE_CACHE_THRASHING_CHECK", "0")
