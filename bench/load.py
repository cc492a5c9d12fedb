"""`python -m bench.load`: many agents on one box, more than fit.

Conversations whose working sets exceed memory, by who is let in (`sessions`); how long running
agents wait while a long prompt is computed (`gap`); what grammars add to a step of many rows
(`grammar`). Give parts, or none for all of the preset.

    python -m bench.load --json load.jsonl
    python -m bench.load sessions --preset gpu
    python -m bench.load table load.jsonl > bench/results/page.md
"""

import argparse
import sys
import time
from collections.abc import Sequence

from bench.load_findings import LoadRecord, lines, markdown
from bench.load_presets import PARTS, PRESETS
from bench.runner import machine, run
from bench.swarm_records import append, read_as, today
from bench.swarm_setup import prepare
from mlx_swarm.broker.backend import describe
from mlx_swarm.broker.errors import InvalidSetting

TABLE = "table"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure as the command line asks for, or write the table of what was measured."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == [TABLE]:
        if not arguments[1:]:
            raise InvalidSetting("table needs the files that `--json` wrote")
        sys.stdout.write(markdown(read_as(LoadRecord, arguments[1:])))
        return
    options = _options(arguments)
    name = options.preset or ("cpu" if describe().device == "cpu" else "gpu")
    parts = options.parts or list(PARTS)
    _check(name, parts)
    scale = PRESETS[name]
    minutes = sum(scale.seconds[part] for part in parts) / 60
    _say(f"about {minutes:.1f} minutes on the machine that the sizes are for: {', '.join(parts)}")
    # Every part says itself what memory its broker gets.
    setup = prepare(scale.model, scale.dtype, ram="0", copies=0)
    _say(f"{scale.model}, {setup.loaded.dtype}; attention: {setup.attention}")
    for part in parts:
        start = time.perf_counter()
        for found in PARTS[part](setup, scale):
            if options.json:
                record = LoadRecord(
                    date=today(),
                    machine=machine(),
                    model=setup.loaded.name,
                    dtype=setup.loaded.dtype,
                    attention=setup.attention,
                    found=found,
                )
                append(options.json, record)
            for line in lines(found):
                print(line, flush=True)
        _say(f"{part} took {time.perf_counter() - start:.0f} s")


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--preset", help=", ".join(PRESETS))
    parser.add_argument("--json", help="add the records to this file")
    return parser.parse_args(arguments)


def _check(preset: str, parts: Sequence[str]) -> None:
    """Raise `InvalidSetting` for a name that is none."""
    if preset not in PRESETS:
        raise InvalidSetting(f"{preset!r} is no preset; there are {', '.join(PRESETS)}")
    for part in parts:
        if part not in PARTS:
            raise InvalidSetting(f"{part!r} is no part; there are {', '.join(PARTS)}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run(main)
