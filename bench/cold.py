"""`python -m bench.cold`: the SSD store against the disk under it and against computing.

Parts: restore and write rates over raw I/O (`rates`), restoring or computing and what the cost gate
chooses (`gate`), decode steps with write-behind (`decode`), opening very many files (`index`), what
agents with a common prefix take on disk (`disk`).

    python -m bench.cold --folder DIRECTORY --json cold.jsonl
    python -m bench.cold gate --preset gpu
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench.cold_behind import DecodeSizes, DiskSizes, decode, disk
from bench.cold_findings import Line, Record, markdown, told
from bench.cold_gate import GateSizes, gate
from bench.cold_index import IndexSizes, index
from bench.cold_rates import RateSizes, rates
from bench.runner import machine, run
from bench.swarm_presets import LLAMA_8B, SMALL
from bench.swarm_records import today
from bench.swarm_setup import Setup, prepare
from mlx_swarm.broker.backend import describe
from mlx_swarm.broker.errors import InvalidSetting


class Scale(NamedTuple):
    """The sizes of every part. Only the gate looks at `long`, a second model, with `long_gate`."""

    model: str
    dtype: str
    rates: RateSizes
    gate: GateSizes
    decode: DecodeSizes
    files: IndexSizes
    disk: DiskSizes
    small: str = SMALL
    long_gate: GateSizes | None = None


PRESETS = {
    "cpu": Scale(
        model="smollm2-135m",
        dtype="float32",
        rates=RateSizes(4096),
        gate=GateSizes((1024, 2048, 4096), 256, repeats=1),
        decode=DecodeSizes(8, 512, 32, 12, written=1024, writes=6, repeats=3),
        files=IndexSizes(100_000),
        disk=DiskSizes(100, 8192, 100),
        long_gate=GateSizes((16_384,), 1024, repeats=1),
    ),
    "gpu": Scale(
        model=LLAMA_8B,
        dtype="bfloat16",
        rates=RateSizes(8192, repeats=3),
        gate=GateSizes((1024, 2048, 4096, 8192, 16_384), 1024, repeats=2),
        decode=DecodeSizes(32, 8192, 128, 48, written=8192, writes=4, repeats=3),
        files=IndexSizes(100_000),
        disk=DiskSizes(100, 8192, 100),
    ),
}

Part = Callable[[Callable[[str], Setup], Scale, Path], Iterator[Line]]


def _gate(setup: Callable[[str], Setup], scale: Scale, folder: Path) -> Iterator[Line]:
    yield from gate(setup(scale.model), scale.gate, folder)
    if scale.long_gate is not None:
        yield from gate(setup(scale.small), scale.long_gate, folder)


PARTS: dict[str, Part] = {
    "rates": lambda setup, scale, folder: rates(setup(scale.model), scale.rates, folder),
    "gate": _gate,
    "decode": lambda setup, scale, folder: decode(setup(scale.model), scale.decode, folder),
    "disk": lambda setup, scale, folder: disk(setup(scale.small), scale.disk, folder),
    "index": lambda setup, scale, folder: index(setup(scale.small), scale.files, folder),
}


def main(arguments: Sequence[str] | None = None) -> list[Line]:
    """Measure, print as it goes, and write the records."""
    options = _options(arguments)
    scale, models, found = _scale(options.preset), dict[str, Setup](), list[Line]()

    def setup(model: str) -> Setup:
        if model not in models:
            models.clear()
            models[model] = prepare(model, scale.dtype, ram="1GiB", copies=0)
        return models[model]

    for part in options.parts or PARTS:
        if part not in PARTS:
            raise InvalidSetting(f"{part!r} is no part; there are {', '.join(PARTS)}")
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            for line in PARTS[part](setup, scale, Path(folder)):
                found.append(line)
                print(told(line), file=sys.stderr, flush=True)
                _append(options.json, line, next(iter(models.values())))
    sys.stdout.write(f"{machine()}; load {os.getloadavg()[0]:.1f}\n\n{markdown(found)}")
    return found


def _append(path: Path | None, line: Line, setup: Setup) -> None:
    if path is None:
        return
    record = Record(
        date=today(),
        machine=machine(),
        model=setup.loaded.name,
        dtype=setup.loaded.dtype,
        load=os.getloadavg()[0],
        line=line,
    )
    with open(path, "ab") as file:
        file.write(msgspec.json.encode(record) + b"\n")


def _scale(name: str | None) -> Scale:
    name = name or ("cpu" if describe().device == "cpu" else "gpu")
    if name not in PRESETS:
        raise InvalidSetting(f"{name!r} is no preset; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cold",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--preset", help=", ".join(PRESETS))
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to be measured")
    parser.add_argument("--json", type=Path, help="add the records to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run(main)
