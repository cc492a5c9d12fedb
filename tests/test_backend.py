"""What MLX is told before it is imported."""

import os
import subprocess
import sys

import pytest

SHOW = "import mlx_swarm.broker, os; print(*(os.environ.get(n) for n in {names}))"
NAMES = (
    "MLX_CUDA_GRAPH_CACHE_SIZE",
    "MLX_CUDA_SDPA_CACHE_SIZE",
    "MLX_ENABLE_CACHE_THRASHING_CHECK",
)


@pytest.mark.parametrize(
    ("given", "seen"),
    [({}, ["4096", "4096", "0"]), (dict.fromkeys(NAMES, "77"), ["77", "77", "77"])],
)
def test_a_server_with_cuda_may_see_any_number_of_shapes(
    given: dict[str, str], seen: list[str]
) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in NAMES} | given
    command = [sys.executable, "-c", SHOW.format(names=NAMES)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == seen
