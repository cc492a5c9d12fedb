"""What MLX is told before it is imported."""

import os
import subprocess
import sys
from importlib import metadata

import pytest

from mlx_swarm.broker.backend import BLAS_HINT

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


def run_without_blas(*command: str) -> str:
    """What a command says on stderr if the library that it is told to use is not there."""
    environment = os.environ | {"MLX_SWARM_BLAS": "/no/such.so"}
    run = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=True
    )
    return run.stderr


on_cpu = pytest.mark.skipif(
    sys.platform != "linux" or not list(metadata.distributions(name="mlx-cpu")),
    reason="only MLX's CPU build for Linux needs a BLAS",
)


@on_cpu
def test_a_blas_that_cannot_be_loaded_is_named_once() -> None:
    said = run_without_blas("-c", "import mlx_swarm.broker; mlx_swarm.broker.Broker")
    [line] = said.splitlines()
    assert line.startswith("MLX_SWARM_BLAS=/no/such.so is not used: ")
    assert "No such file" in line


@on_cpu
def test_the_demo_says_that_it_is_slow_and_why() -> None:
    model = "synthetic:llama?layers=1&context=1024&tokenizer=smollm2-135m"
    demo = ("demo", "--no-cold", "--agents", "1", "--max-tokens", "1", "--model", model)
    said = run_without_blas("-m", "mlx_swarm.broker.cli", *demo).splitlines()
    assert [line for line in said if line.startswith("MLX_SWARM_BLAS")] == said[:1]
    assert BLAS_HINT in said
