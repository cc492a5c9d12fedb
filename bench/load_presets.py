"""What `bench.load` measures on a GPU and on a CPU, part by part, and about how long it takes."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from bench.load_findings import Finding
from bench.load_sessions import SessionSizes, sessions
from bench.swarm_presets import LLAMA_8B, SMALL
from bench.swarm_setup import Setup


class LoadScale(NamedTuple):
    """The sizes of every part for one kind of machine; `seconds` are about what each takes."""

    model: str
    dtype: str
    seconds: dict[str, int]
    sessions: SessionSizes


PARTS: dict[str, Callable[[Setup, LoadScale], Iterator[Finding]]] = {
    "sessions": lambda setup, scale: sessions(setup, scale.sessions),
}

GPU = LoadScale(
    model=LLAMA_8B,
    dtype="bfloat16",
    seconds={"sessions": 400},
    sessions=SessionSizes(100, 4, 2048, 512, 64, rows=32, think=1.0, repeats=2),
)
CPU = LoadScale(
    model=SMALL,
    dtype="float32",
    seconds={"sessions": 120},
    sessions=SessionSizes(24, 4, 128, 128, 4, rows=4, think=0.2),
)
PRESETS = {"cpu": CPU, "gpu": GPU}
