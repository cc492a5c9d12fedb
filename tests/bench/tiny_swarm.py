"""Sizes for `bench.swarm` that take seconds, with a model that takes none."""

from bench.swarm_arrival import ArrivalSizes
from bench.swarm_clones import CloneSizes
from bench.swarm_gap import GapSizes
from bench.swarm_load import LoadSizes
from bench.swarm_overhead import OverheadSizes
from bench.swarm_presets import PARTS, Preset, Scale
from bench.swarm_sharing import SharingSizes
from bench.swarm_steps import StepSizes

TINY = Scale(
    model="synthetic:llama?layers=2&hidden=64&heads=4&kv_heads=2&intermediate=64&context=2048",
    dtype="float32",
    ram="64MiB",
    copies=10**9,
    seconds=dict.fromkeys(PARTS, 3),
    steps=StepSizes((2,), (0, 64), replicated=((3, 64),), tail=8, steps=2, repeats=1),
    arrivals=(ArrivalSizes(3, 64, 8, 6, repeats=1),),
    load=LoadSizes(5, 2, (40, 60), (3, 9), (4, 8), rate=100.0),
    overhead=OverheadSizes(3, 64, 8, 8, repeats=1),
    gap=GapSizes(2, 40, 8, 1200, steps=4, repeats=1),
    memory=CloneSizes(3, 256, 8, 6),
    sharing=SharingSizes((1, 3), (16, 64), (2,), 4, (32,), tail=8, steps=2, repeats=1),
)
ALL = Preset(TINY, tuple(PARTS))
