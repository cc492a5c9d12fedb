"""`bench.serve`: every part starts its servers, measures, and says what it found."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench import serve, serve_parts
from bench.serve_parts import ServeScale
from bench.serve_servers import Server
from mlx_swarm.broker.errors import InvalidSetting
from tests.server.serving import serving
from tests.tiny_broker import TINY

SMALLEST = ServeScale(TINY.replace("context=256", "context=2048"), 2, 2, 130, 10, 4, 2, "64MiB")


@pytest.mark.parametrize("arguments", [["nothing"], ["--preset", "none"]])
def test_a_name_that_is_none_is_refused(arguments: list[str]) -> None:
    with pytest.raises(InvalidSetting, match="there are"):
        serve.main(arguments)


@contextmanager
def in_this_process(model: str, *, rows: int, ram: str) -> Iterator[Server]:
    """A server without the seconds that a process of its own takes to start."""
    with serving(model, max_rows=rows, ram=ram) as url:
        yield Server(int(url.rpartition(":")[2]), "")


def test_streams_and_turns_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(serve_parts.PRESETS, "smallest", SMALLEST)
    monkeypatch.setattr(serve_parts, "swarm_server", in_this_process)
    file = tmp_path / "serve.json"
    serve.main(["streams", "turns", "--preset", "smallest", "--json", str(file)])
    report = json.loads(file.read_bytes())
    names = [figure["contender"] for each in report["comparisons"] for figure in each["figures"]]
    assert names == ["one socket", "2 sockets", "Python API", "second turn", "first turn"]
    printed = capsys.readouterr().out
    assert "one socket over the Python API" in printed
    assert "prompt tokens" in printed
