"""What `bench.swarm` measures on a GPU and on a CPU, part by part, and about how long it takes."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from bench.swarm_arrival import ArrivalSizes, arrival, replicated_arrival
from bench.swarm_clones import CloneSizes, clones
from bench.swarm_findings import Found
from bench.swarm_gap import GapSizes, gap
from bench.swarm_load import LoadSizes, load
from bench.swarm_overhead import OverheadSizes, overhead
from bench.swarm_setup import Setup
from bench.swarm_sharing import SharingSizes, sharing
from bench.swarm_steps import StepSizes, steps

LLAMA_8B = (
    "synthetic:llama?layers=32&hidden=4096&heads=32&kv_heads=8&intermediate=14336&vocab=128256"
    "&context=65536"
)
SMALL = (
    "synthetic:llama?layers=4&hidden=256&heads=8&kv_heads=2&intermediate=512&vocab=4096"
    "&context=65536"
)
"""Its vocabulary is large enough for random prompts not to begin alike."""


class Scale(NamedTuple):
    """The sizes of every part for one kind of machine; `seconds` are about what each takes there.

    The broker's cache has `ram`, copies of the prefix in every row may take `copies` bytes.
    """

    model: str
    dtype: str
    ram: str
    copies: int
    seconds: dict[str, int]
    steps: StepSizes
    arrivals: tuple[ArrivalSizes, ...]
    load: LoadSizes
    overhead: OverheadSizes
    gap: GapSizes
    memory: CloneSizes
    sharing: SharingSizes


class Preset(NamedTuple):
    """Parts that fit one call, at a scale."""

    scale: Scale
    parts: tuple[str, ...]


def _arrivals(setup: Setup, scale: Scale) -> Iterator[Found]:
    for sizes in scale.arrivals:
        yield from arrival(setup, sizes)


def _replicated(setup: Setup, scale: Scale) -> Iterator[Found]:
    for sizes in scale.arrivals:
        yield from replicated_arrival(setup, sizes)


PARTS: dict[str, Callable[[Setup, Scale], Iterator[Found]]] = {
    "steps": lambda setup, scale: steps(setup, scale.steps),
    "arrival": _arrivals,
    # Apart, and last: it is the one that can run out of memory.
    "replicated-arrival": _replicated,
    "overhead": lambda setup, scale: overhead(setup, scale.overhead),
    "gap": lambda setup, scale: gap(setup, scale.gap),
    "memory": lambda setup, scale: clones(setup, scale.memory),
    "sharing": lambda setup, scale: sharing(setup, scale.sharing),
    "load": lambda setup, scale: load(setup, scale.load),
}

GPU = Scale(
    model=LLAMA_8B,
    dtype="bfloat16",
    ram="40GiB",
    copies=120 * 10**9,
    seconds={
        "steps": 330,
        "arrival": 110,
        "replicated-arrival": 280,
        "overhead": 40,
        "gap": 30,
        "memory": 20,
        "sharing": 300,
        "load": 150,
    },
    steps=StepSizes(
        rows=(1, 8, 32, 64, 128, 256),
        prefixes=(0, 2048, 8192, 32768),
        plain=((64, 8192), (256, 8192), (64, 32768)),
        replicated=((8, 8192), (64, 2048), (64, 8192)),
    ),
    arrivals=tuple(
        ArrivalSizes(agents, shared, 128, 128) for agents in (32, 64) for shared in (4096, 8192)
    ),
    load=LoadSizes(64, 4, (2048, 8192), (10, 2000), (64, 256)),
    overhead=OverheadSizes(64, 8192, 128, 128),
    gap=GapSizes(8, 2048, 128, 16384),
    memory=CloneSizes(64, 8192, 128, 128),
    sharing=SharingSizes(
        rows=(1, 2, 4, 8, 16, 32, 64),
        spans=(16, 64, 128, 256, 512, 1024, 4096),
        groups=(2, 4, 8, 16),
        group_rows=64,
        group_spans=(256, 1024, 4096),
        steps=16,
    ),
)
CPU = Scale(
    model=SMALL,
    dtype="float32",
    ram="2GiB",
    copies=10**9,
    seconds={
        "steps": 75,
        "arrival": 25,
        "replicated-arrival": 30,
        "overhead": 25,
        "gap": 12,
        "memory": 6,
        "sharing": 45,
        "load": 20,
    },
    steps=StepSizes(
        rows=(1, 8, 32),
        prefixes=(0, 256, 1024, 4096),
        replicated=((8, 1024), (32, 1024)),
        tail=32,
        steps=6,
    ),
    arrivals=(ArrivalSizes(8, 1024, 32, 16), ArrivalSizes(16, 512, 32, 16)),
    load=LoadSizes(16, 4, (128, 512), (10, 200), (8, 32)),
    overhead=OverheadSizes(64, 256, 16, 24, repeats=3),
    gap=GapSizes(8, 256, 32, 2048, steps=16, repeats=2),
    memory=CloneSizes(16, 1024, 32, 16),
    sharing=SharingSizes(
        rows=(1, 4, 16),
        spans=(16, 64, 256, 1024),
        groups=(2, 4),
        group_rows=16,
        group_spans=(64, 256),
        tail=32,
        steps=6,
    ),
)
PRESETS = {
    "cpu": Preset(CPU, tuple(PARTS)),
    "gpu-steps": Preset(GPU, ("steps",)),
    "gpu-arrival": Preset(GPU, ("arrival", "replicated-arrival")),
    "gpu-load": Preset(GPU, ("overhead", "gap", "memory", "load")),
    "gpu-sharing": Preset(GPU, ("sharing",)),
}
