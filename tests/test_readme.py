"""What the README says can be done, can be done."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
README = (PROJECT / "README.md").read_text("utf-8")


def block(language: str) -> str:
    """The one code block of a language."""
    [found] = re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return str(found)


def test_the_python_runs_as_it_stands() -> None:
    done = subprocess.run([sys.executable, "-c", block("python")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *replies, cached = done.stdout.splitlines()
    assert len(replies) >= 2
    assert int(cached) > 0


def test_the_python_is_ten_lines() -> None:
    assert len([line for line in block("python").splitlines() if line]) <= 10


def test_the_commands_are_targets_of_the_makefile() -> None:
    makefile = (PROJECT / "Makefile").read_text("utf-8")
    commands = re.findall(r"^make (\w+)", block("sh"), re.MULTILINE)
    assert commands == ["demo", "test"]
    for command in commands:
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)


@pytest.mark.parametrize("target", re.findall(r"\]\((?!https?:)([^)]+)\)", README))
def test_links_lead_somewhere(target: str) -> None:
    assert (PROJECT / target).exists()
