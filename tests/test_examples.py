"""The examples run as they are."""

import subprocess
import sys
from pathlib import Path

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


def test_summarize_folder_says_what_it_needs() -> None:
    done = run("summarize_folder.py")
    assert done.returncode == 1
    assert "FOLDER" in done.stderr
