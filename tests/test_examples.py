"""The examples run as they are."""

import subprocess
import sys
from pathlib import Path

import pytest

from mlx_swarm.broker.models import load
from tests.models.tiny_adapter import write_adapter

EXAMPLES = Path(__file__).parents[1] / "examples"
MODEL = "synthetic:llama?layers=2&context=2048&tokenizer=smollm2-135m"


def run(example: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / example), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_summarize_folder(tmp_path: Path) -> None:
    for name, text in (("a", "The bridge is closed."), ("b", "Lunch is at noon."), ("c", "")):
        (tmp_path / f"{name}.txt").write_text(text)
    done = run("summarize_folder.py", str(tmp_path), "*.txt", MODEL)
    assert done.returncode == 0, done.stderr
    *lines, total = done.stdout.splitlines()
    assert any(line.startswith("a.txt: ") for line in lines)
    assert any(line.startswith("b.txt: ") for line in lines)
    assert "c.txt" not in done.stdout
    assert total.startswith("2 agents, ")
    assert not total.endswith(" 0 of them from the cache")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "FOLDER"),
        (["FOLDER", "*", "model", "more"], 2, "more"),
        (["/no/such/folder"], 2, "there is no folder /no/such/folder"),
        (["FOLDER"], 1, "matches *.txt has any text"),
    ],
)
def test_summarize_folder_says_what_is_wrong(
    arguments: list[str], code: int, said: str, tmp_path: Path
) -> None:
    arguments = [str(tmp_path) if word == "FOLDER" else word for word in arguments]
    done = run("summarize_folder.py", *arguments)
    assert done.returncode == code
    assert said in done.stderr
    assert done.stdout == ""


def test_summarize_folder_has_help() -> None:
    done = run("summarize_folder.py", "--help")
    assert done.returncode == 0
    assert "FOLDER" in done.stdout


def test_several_models(tmp_path: Path) -> None:
    folder = str(write_adapter(tmp_path, load(MODEL).model))
    models = ["--model", MODEL, "--adapter", folder, "--draft", MODEL]
    done = run("several_models.py", "What is a harbour?", *models)
    assert done.returncode == 0, done.stderr
    *answers, weights, proposed = done.stdout.splitlines()
    said = dict(line.split(": ", 1) for line in answers)
    assert said.keys() == {"the model", folder, "with a draft"}
    assert said["the model"] == said["with a draft"] != said[folder]
    assert weights.endswith("bytes of weights in memory")
    accepted, _, drafted, *_ = proposed.split()
    assert 0 < int(accepted) <= int(drafted)


def test_agents_with_tools() -> None:
    done = run("agents_with_tools.py", MODEL)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {line.split(":")[0] for line in lines} == {"North", "South", "West"}
    for line in lines:
        cached, _, kept, *_ = line.rsplit("(", 1)[1].split()
        assert int(kept) - 2 <= int(cached) <= int(kept)
