"""The command line: what it prints, its exit codes, and one line for everything that goes wrong."""

import os
import signal
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlx_swarm.broker import cli
from mlx_swarm.broker.interrupts import SAME_SECONDS
from tests.cache.ssd.folders import store_all

MODEL = "synthetic:llama?layers=2&context=4096&tokenizer=smollm2-135m"
DEMO = ("demo", "--no-cold", "--model", MODEL, "--max-tokens", "6")
KEYS = {
    "agents",
    "shared_prefix_tokens",
    "prompt_tokens",
    "cached_tokens",
    "restored_tokens",
    "prefilled_tokens",
    "seconds",
    "per_agent",
}
AGENT_KEYS = {
    "name",
    "prompt_tokens",
    "cached_tokens",
    "prefilled_tokens",
    "ttft_s",
    "output_tokens",
    "text",
}

Captured = pytest.CaptureFixture[str]


def complaint(capsys: Captured, *arguments: str, code: int = 1) -> str:
    """The one line that a command line fails with."""
    assert cli.run(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if not line.startswith("model: ")]
    [line] = lines
    assert line.startswith("mlx-swarm: ")
    return line


def test_version(capsys: Captured) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"mlx-swarm {metadata.version('mlx-swarm')}\n"


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_the_commands(capsys: Captured, arguments: list[str]) -> None:
    assert cli.run(arguments) == 0
    assert "demo" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "--help"],
        ["demo", "--agents", "0"],
        ["demo", "--max-tokens", "0"],
        ["cache", "ls", "-C", "FOLDER"],
        ["cache", "show", "", "-C", "FOLDER"],
        ["cache", "verify", "-C", "FOLDER"],
        ["cache", "rm", "--all", "-C", "FOLDER"],
    ],
)
def test_what_needs_no_model_does_not_import_mlx(arguments: list[str], tmp_path: Path) -> None:
    store_all(tmp_path, [range(20)])
    line = [str(tmp_path) if word == "FOLDER" else word for word in arguments]
    code = (
        f"import sys; from mlx_swarm.broker import cli; cli.run({line}); "
        "sys.exit('mlx.core' in sys.modules or 'mlx_lm' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.fixture(scope="module")
def compared() -> dict[str, Any]:
    """The report of nine agents, run with sharing and without."""
    command = [sys.executable, "-m", "mlx_swarm.broker.cli", *DEMO]
    options = ["--json", "--compare", "--agents", "9"]
    done = subprocess.run([*command, *options], check=True, capture_output=True, text=True)
    [line] = done.stdout.splitlines()
    report: dict[str, Any] = msgspec.json.decode(line)
    return report


def test_a_second_run_reads_its_instructions_from_disk(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLX_SWARM_CACHE", str(tmp_path))
    reports = []
    for _ in range(2):
        arguments = ["demo", "--json", "--model", MODEL, "--max-tokens", "4", "--agents", "3"]
        assert cli.run(arguments) == 0
        reports.append(msgspec.json.decode(capsys.readouterr().out))
    first, second = reports
    assert first["restored_tokens"] == 0
    # Or the gate has found that this tiny model computes them faster than the disk reads them.
    if second["restored_tokens"]:
        assert second["restored_tokens"] >= second["shared_prefix_tokens"]
        assert second["prefilled_tokens"] < first["prefilled_tokens"]
    told = [agent["text"] for agent in first["per_agent"]]
    assert [agent["text"] for agent in second["per_agent"]] == told
    assert cli.run(["cache", "ls"]) == 0
    listed = capsys.readouterr().out
    assert "1 " in listed
    assert "synthetic" in listed


def test_json_has_the_totals_and_every_agent(compared: dict[str, Any]) -> None:
    assert set(compared) == KEYS | {"without_sharing"}
    assert set(compared["without_sharing"]) == KEYS
    for report in (compared, compared["without_sharing"]):
        agents = report["per_agent"]
        assert report["agents"] == len(agents) == len({agent["name"] for agent in agents}) == 9
        for agent in agents:
            assert set(agent) == AGENT_KEYS
            assert agent["prompt_tokens"] == agent["cached_tokens"] + agent["prefilled_tokens"]
            assert 1 <= agent["output_tokens"] <= 6
            assert 0 < agent["ttft_s"] <= report["seconds"]
        for field in ("prompt_tokens", "cached_tokens", "prefilled_tokens"):
            assert report[field] == sum(agent[field] for agent in agents)


def test_instructions_are_computed_once(compared: dict[str, Any]) -> None:
    shared = compared["shared_prefix_tokens"]
    suffixes = sum(agent["prompt_tokens"] - shared for agent in compared["per_agent"])
    assert 200 < shared < 1000
    assert compared["prefilled_tokens"] <= shared + suffixes + 8


def test_without_sharing_everything_is_computed(compared: dict[str, Any]) -> None:
    alone = compared["without_sharing"]
    assert alone["prefilled_tokens"] == alone["prompt_tokens"] == compared["prompt_tokens"]
    texts = [[agent["text"] for agent in run["per_agent"]] for run in (compared, alone)]
    assert texts[0] == texts[1]


def test_demo_prints_lines_and_a_table_and_leaves_no_thread(capsys: Captured) -> None:
    before = set(threading.enumerate())
    assert cli.run([*DEMO, "--agents", "2"]) == 0
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=30)  # anyio tells its idle workers to end, and does not wait for them
        assert not thread.is_alive(), thread.name
    printed = capsys.readouterr().out
    assert printed.startswith("2 agents, sharing their instructions …\n")
    assert "summary | " in printed


@pytest.mark.parametrize(
    ("option", "value"),
    [("--agents", "0"), ("--agents", "-3"), ("--agents", "9" * 20), ("--max-tokens", "0")],
)
def test_numbers_out_of_range(capsys: Captured, option: str, value: str) -> None:
    assert f"{option} is {value}" in complaint(capsys, "demo", f"{option}={value}")


@pytest.mark.parametrize(
    "arguments", [["demo", "--agents", "many"], ["demo", "--bogus"], ["nothing"], ["demo", "extra"]]
)
def test_unreadable_command_lines(capsys: Captured, arguments: list[str]) -> None:
    assert "--help" in complaint(capsys, *arguments, code=2)


def test_unknown_model(capsys: Captured, tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing.gguf")
    assert missing in complaint(capsys, "demo", "--model", missing)


def test_broken_gguf(capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SWARM_CACHE", str(tmp_path / "cache"))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + os.urandom(64))
    assert "broken.gguf" in complaint(capsys, "demo", "--model", str(broken))
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_prompt_longer_than_the_context(capsys: Captured) -> None:
    model = MODEL.replace("4096", "128")
    assert "128" in complaint(capsys, "demo", "--json", "--model", model)


def test_cache_folder_that_cannot_be_written(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    monkeypatch.setenv("MLX_SWARM_CACHE", str(in_the_way / "cache"))
    assert str(in_the_way) in complaint(capsys, "demo")


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ([signal.SIGHUP], 129),
        ([signal.SIGINT] * 3, 130),
        ([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], 143),
    ],
)
def test_signals_end_it_quietly(numbers: list[signal.Signals], code: int) -> None:
    command = [sys.executable, "-m", "mlx_swarm.broker.cli", *DEMO, "--max-tokens", "3000"]
    # What starts the tests in the background lets its children ignore Ctrl-C, nohup a hang-up.
    kinds: dict[signal.Signals, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: signal.SIG_DFL,
    }
    inherited = {number: signal.signal(number, usual) for number, usual in kinds.items()}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    for number, handler in inherited.items():
        signal.signal(number, handler)
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        while " | " not in process.stdout.readline():  # agents are writing
            assert process.poll() is None
        process.send_signal(numbers[0])
        while "stopping after the current step" not in process.stderr.readline():
            assert process.poll() is None
        for number in numbers[1:]:
            time.sleep(0.02)  # else the system makes one of several
            process.send_signal(number)
        complaints = process.communicate()[1]
    assert process.returncode == code
    assert complaints == ""


WAIT_FOR_EVER = """
import time
from mlx_swarm.broker.interrupts import INTERRUPTS
INTERRUPTS.install()
with INTERRUPTS.ended_by(lambda: None):
    print("ready", flush=True)
    while True:
        time.sleep(1)
"""


def test_a_second_signal_ends_at_once_what_does_not_end() -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", WAIT_FOR_EVER]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert "a second Ctrl-C ends it at once" in process.stderr.readline()
        time.sleep(1.5 * SAME_SECONDS)
        process.send_signal(signal.SIGTERM)
        assert process.communicate() == ("", "")
    assert process.returncode == 143


def test_a_signal_while_the_model_loads_says_that_it_loads() -> None:
    command = [sys.executable, "-m", "mlx_swarm.broker.cli", *DEMO]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("model: ")
        process.send_signal(signal.SIGTERM)
        said = process.communicate()[1].splitlines()
    [line] = [line for line in said if not line.startswith("model: ")]
    assert line.startswith("mlx-swarm: stopping as soon as loading allows")
    assert process.returncode == 143


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("arguments", [["--version"], ["demo", "--help"]])
def test_output_that_cannot_be_written_is_one_line(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "mlx_swarm.broker.cli", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.stderr == "mlx-swarm: No space left on device\n"
    assert done.returncode == 1


def test_a_terminal_without_width_is_printed_to_all_the_same(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert cli.run([*DEMO, "--agents", "1"]) == 0
    assert "summary" in capsys.readouterr().out
