"""Benchmarks: every figure is a ratio of two things measured in turns in one run."""

# The backend puts a fast BLAS in place, which must happen before a benchmark imports MLX.
from mlx_swarm.broker import backend as _backend  # noqa: F401
