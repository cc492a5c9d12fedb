"""Servers as processes of their own, on free ports of this machine."""

import http.client
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from mlx_lm.utils import save

from mlx_swarm.broker.errors import SwarmError
from mlx_swarm.broker.models import load
from mlx_swarm.broker.models.embedded import NAME, embedded_directory

START_SECONDS = 300.0


class Server(NamedTuple):
    """Where a server listens, and what it calls its model."""

    port: int
    model: str


def model_folder(model: str, scratch: Path) -> str:
    """A folder that mlx-lm can load: the embedded model's, or a synthetic one written there."""
    if model == NAME:
        from mlx_swarm.broker.models.cache_folder import cache_folder

        return str(embedded_directory(cache_folder(), lambda progress: None))
    loaded = load(model)
    folder = scratch / "model"
    save(folder, scratch, loaded.model, loaded.tokenizer, loaded.config)
    return str(folder)


@contextmanager
def swarm_server(model: str, *, rows: int, ram: str) -> Iterator[Server]:
    """`mlx-swarm serve`."""
    port = _free_port()
    options = ["--port", str(port), "--max-rows", str(rows), "--ram", ram]
    command = ["-m", "mlx_swarm.broker.cli", "serve", model, *options]
    with _running(command, port, "/healthz"):
        yield Server(port, model)


@contextmanager
def stock_server(model: str, *, rows: int) -> Iterator[Server]:
    """`mlx_lm.server`, with as many rows at a time."""
    port = _free_port()
    options = ["--port", str(port), "--decode-concurrency", str(rows), "--log-level", "ERROR"]
    command = ["-m", "mlx_lm.server", "--model", model, *options]
    with _running(command, port, "/health"):
        yield Server(port, model)


@contextmanager
def _running(command: Sequence[str], port: int, health: str) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL)
    try:
        _wait(process, port, health)
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: "subprocess.Popen[bytes]", port: int, health: str) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SwarmError(f"the server on port {port} ended with {process.returncode}")
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", health)
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.1)
        finally:
            connection.close()
    raise SwarmError(f"the server on port {port} was not ready after {START_SECONDS:.0f} s")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
