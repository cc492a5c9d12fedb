"""What the README says can be done, can be done."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
README = (PROJECT / "README.md").read_text("utf-8")
SERVED = "smollm2-135m"
RANDOM = f"synthetic:llama?layers=1&hidden=32&heads=2&context=8192&tokenizer={SERVED}"


def blocks(language: str) -> list[str]:
    """The code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


COMMANDS, START, EXPORTS, CURL = blocks("sh")
TEN_LINES, OPENAI, AGENTS, ANTHROPIC = blocks("python")


@pytest.fixture(scope="module")
def clients() -> Iterator[dict[str, str]]:
    """The environment of clients, as the README sets it, for a server on a free port.

    What it serves has the name and the tokenizer of the README's model, and random weights.
    """
    options = ("--alias", f"{SERVED}={RANDOM}", "--port", "0", "--ram", "64MiB")
    command = [sys.executable, "-m", "mlx_swarm.broker.cli", "serve", RANDOM, *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            lines = iter(server.stderr.readline, "")
            url = next(found[1] for line in lines if (found := re.search(r"at (http://\S+)", line)))
            variables = re.findall(r"(\w+)=(\S+)", EXPORTS)
            yield {name: value.replace("http://127.0.0.1:8321", url) for name, value in variables}
        finally:
            server.terminate()


def run(*command: str, environment: dict[str, str]) -> list[str]:
    """The lines that a program writes; it must not fail."""
    whole = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=whole, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_python_runs_as_it_stands() -> None:
    *replies, cached = run(sys.executable, "-c", TEN_LINES, environment={})
    assert len(replies) >= 2
    assert int(cached) > 0


def test_the_python_is_ten_lines() -> None:
    assert len([line for line in TEN_LINES.splitlines() if line]) <= 10


def test_the_server_starts_with_what_is_there() -> None:
    assert START == f".venv/bin/mlx-swarm serve {SERVED}\n"


def test_openais_client_forks_on_one_socket(clients: dict[str, str]) -> None:
    *_, one, another = run(sys.executable, "-c", OPENAI, environment=clients)
    (name, cached), (other, also_cached) = one.split(), another.split()
    assert {name, other} == {"north", "south"}
    assert int(cached) > 0 < int(also_cached)


def test_openais_agents_hand_over_and_call(clients: dict[str, str]) -> None:
    # Isolated: the package is named as a folder here is.
    [line] = run(sys.executable, "-I", "-c", AGENTS, environment=clients)
    assert line in ("pilot Black Sea: deep", "pilot North Sea: deep")


def test_anthropics_client_streams(clients: dict[str, str]) -> None:
    *_, cached = run(sys.executable, "-c", ANTHROPIC, environment=clients)
    assert int(cached) >= 0


def test_curl_is_enough(clients: dict[str, str]) -> None:
    [line] = run("sh", "-c", CURL, environment=clients)
    assert '"object":"chat.completion"' in line


def test_the_commands_are_targets_of_the_makefile() -> None:
    makefile = (PROJECT / "Makefile").read_text("utf-8")
    commands = re.findall(r"^make (\w+)", COMMANDS, re.MULTILINE)
    assert commands == ["demo", "test"]
    for command in commands:
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)


@pytest.mark.parametrize("target", re.findall(r"\]\((?!https?:)([^)]+)\)", README))
def test_links_lead_somewhere(target: str) -> None:
    assert (PROJECT / target).exists()
