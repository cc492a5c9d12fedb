"""What a run that is told to end has computed is on disk afterwards."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_swarm.broker import cli
from tests.test_cli import MODEL


@pytest.fixture(params=[signal.SIGHUP])
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal that children do not ignore, as they would under nohup."""
    before = signal.signal(request.param, signal.SIG_DFL)
    yield request.param
    signal.signal(request.param, before)


def test_a_run_that_is_told_to_end_writes_first_what_it_has_computed(
    number: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = [
        sys.executable,
        "-m",
        "mlx_swarm.broker.cli",
        "demo",
        "--model",
        MODEL,
        "--max-tokens",
        "3000",
    ]
    environment = {**os.environ, "MLX_SWARM_CACHE": str(tmp_path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        while " | " not in process.stdout.readline():  # agents are writing
            assert process.poll() is None
        process.send_signal(number)
        process.stdout.read()
    assert process.returncode == 128 + number
    monkeypatch.setenv("MLX_SWARM_CACHE", str(tmp_path))
    assert cli.run(["cache", "verify"]) == 0
    capsys.readouterr()
    assert cli.run(["cache", "ls"]) == 0
    files, tokens = capsys.readouterr().out.splitlines()[1].split()[1:3]
    # The instructions at least, which had been stored for the agents.
    assert int(files) >= 1
    assert int(tokens.replace(",", "")) > 800
