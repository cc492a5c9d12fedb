"""What `bench.load` measures on a GPU and on a CPU, part by part, and about how long it takes."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from bench import sampling
from bench.load_findings import Asking, Finding, Gaps
from bench.load_sessions import SessionSizes, sessions
from bench.swarm_gap import GapSizes, gap
from bench.swarm_presets import CPU as SWARM_CPU
from bench.swarm_presets import GPU as SWARM_GPU
from bench.swarm_presets import LLAMA_8B, SMALL
from bench.swarm_setup import Setup, prepare


class LoadScale(NamedTuple):
    """The sizes of every part for one kind of machine; `seconds` are about what each takes. The
    brokers of gaps have `ram`; `speaks` is a model for grammars, instead of the one of all parts.
    """

    model: str
    dtype: str
    seconds: dict[str, int]
    sessions: SessionSizes
    gap: GapSizes
    grammar: sampling.Sizes
    ram: str
    speaks: str = ""


def _gaps(setup: Setup, scale: LoadScale) -> Iterator[Finding]:
    for found in gap(setup._replace(ram=scale.ram), scale.gap):
        yield Gaps(gap=found)


def _asking(setup: Setup, scale: LoadScale) -> Iterator[Finding]:
    """Where the model's tokenizer knows bytes only, with another: masks are of its vocabulary."""
    if scale.speaks:
        setup = prepare(scale.speaks, scale.dtype, ram="1GiB", copies=0)
    yield Asking(rows=scale.grammar.rows, comparison=sampling.sampling(setup, scale.grammar))


PARTS: dict[str, Callable[[Setup, LoadScale], Iterator[Finding]]] = {
    "sessions": lambda setup, scale: sessions(setup, scale.sessions),
    "gap": _gaps,
    "grammar": _asking,
}

GPU = LoadScale(
    model=LLAMA_8B,
    dtype="bfloat16",
    seconds={"sessions": 400, "gap": 30, "grammar": 40},
    sessions=SessionSizes(100, 4, 2048, 512, 64, rows=32, think=1.0, repeats=2),
    gap=SWARM_GPU.gap,
    grammar=sampling.Sizes(rows=32, steps=48, repeats=5),
    ram=SWARM_GPU.ram,
)
CPU = LoadScale(
    model=SMALL,
    dtype="float32",
    seconds={"sessions": 120, "gap": 20, "grammar": 40},
    sessions=SessionSizes(24, 4, 128, 128, 4, rows=4, think=0.2),
    gap=SWARM_CPU.gap,
    grammar=sampling.Sizes(rows=32, steps=16, repeats=3),
    ram=SWARM_CPU.ram,
    speaks=sampling.MODEL,
)
PRESETS = {"cpu": CPU, "gpu": GPU}
