"""`python -m bench.serve`: what the wire costs, and the server beside mlx-lm's.

Many streams over one WebSocket and over one each against the same requests through the Python API
(`streams`); the second turn of a chat against the first (`turns`); clients that share instructions
on this server and on `mlx_lm.server`, with the same model (`stock`). Servers and clients are
processes of their own. Give parts, or none for all.

    python -m bench.serve --json serve.json
    python -m bench.serve streams --preset gpu
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.runner import Report, machine, run
from bench.serve_parts import PARTS, PRESETS, ServeScale
from bench.serve_servers import model_folder
from mlx_swarm.broker.backend import describe
from mlx_swarm.broker.errors import InvalidSetting


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure as the command line asks for."""
    options = _options(sys.argv[1:] if arguments is None else arguments)
    name = options.preset or ("cpu" if describe().device == "cpu" else "gpu")
    parts = options.parts or list(PARTS)
    scale = _scale(name, parts)
    comparisons = []
    with tempfile.TemporaryDirectory() as scratch:
        # All contenders load one folder: mlx-lm's server knows no other form.
        folder = model_folder(scale.model, Path(scratch))
        for part in parts:
            print(f"{part}: {scale.model}", file=sys.stderr, flush=True)
            for found in PARTS[part](folder, scale):
                comparisons.append(found.comparison)
                for line in found.lines():
                    print(line, flush=True)
    report = Report(
        benchmark="bench.serve",
        machine=machine(),
        settings={"model": scale.model, "preset": name},
        comparisons=tuple(comparisons),
    )
    report.print()
    if options.json:
        report.write(options.json)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--preset", help=", ".join(PRESETS))
    parser.add_argument("--json", help="write the report to this file")
    return parser.parse_args(arguments)


def _scale(preset: str, parts: Sequence[str]) -> ServeScale:
    """Raise `InvalidSetting` for a name that is none."""
    if preset not in PRESETS:
        raise InvalidSetting(f"{preset!r} is no preset; there are {', '.join(PRESETS)}")
    for part in parts:
        if part not in PARTS:
            raise InvalidSetting(f"{part!r} is no part; there are {', '.join(PARTS)}")
    return PRESETS[preset]


if __name__ == "__main__":
    run(main)
