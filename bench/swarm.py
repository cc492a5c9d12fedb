"""`python -m bench.swarm`: what sharing a prefix saves, against mlx-lm in the same run.

Give a preset, or parts: decode steps of N rows over a shared prefix (`steps`); N agents that arrive
at once, and the same with mlx-lm (`arrival`, `replicated-arrival`); what the broker adds to a bare
loop (`overhead`); how long a prefill holds up who runs (`gap`); KV of running clones (`memory`);
where sharing pays (`sharing`); agents that come one after the other (`load`).

    python -m bench.swarm --preset gpu-steps --json steps.jsonl
    python -m bench.swarm steps --rows 64 256 --preset gpu-steps --json steps.jsonl
    python -m bench.swarm sharing
    python -m bench.swarm table steps.jsonl arrival.jsonl > bench/results/page.md
"""

import argparse
import sys
import time
from collections.abc import Iterable, Sequence

from bench.runner import positive, run
from bench.swarm_findings import Found
from bench.swarm_presets import LLAMA_8B, PARTS, PRESETS, Preset, Scale
from bench.swarm_records import append, read
from bench.swarm_setup import prepare
from bench.swarm_table import lines, markdown, summary
from mlx_swarm.broker.backend import describe
from mlx_swarm.broker.errors import InvalidSetting

TABLE = "table"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure as the command line asks for, or write the table of what was measured."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == [TABLE]:
        if not arguments[1:]:
            raise InvalidSetting("table needs the files that `--json` wrote")
        sys.stdout.write(markdown(read(arguments[1:])))
        return
    options = _options(arguments)
    preset = _preset(options)
    scale = _scale(preset.scale, options)
    _say(
        f"about {_minutes(preset)} on the machine that the sizes are for: {', '.join(preset.parts)}"
    )
    setup = prepare(scale.model, scale.dtype, ram=scale.ram, copies=scale.copies)
    _say(f"{scale.model}, {setup.loaded.dtype}; attention: {setup.attention}")
    for part in preset.parts:
        start, all_found = time.perf_counter(), list[Found]()
        for found in PARTS[part](setup, scale):
            record = setup.record(found)
            if options.json:
                append(options.json, record)
            all_found.append(found)
            _show(lines(record))
        _show(summary(all_found))
        _say(f"{part} took {time.perf_counter() - start:.0f} s")


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.swarm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="instead of the preset's parts")
    parser.add_argument("--preset", help=", ".join(PRESETS))
    parser.add_argument("--model", help="a model instead of the preset's; `llama-8b` for its shape")
    parser.add_argument("--dtype")
    parser.add_argument("--replicate", type=positive, help="bytes that mlx-lm may take")
    parser.add_argument("--rows", type=positive, nargs="+", help="of the steps, a part of the grid")
    parser.add_argument("--rate", type=float, help="arrivals a second of the load")
    parser.add_argument("--seed", type=int, help="of the load")
    parser.add_argument("--json", help="add the records to this file")
    return parser.parse_args(arguments)


def _preset(options: argparse.Namespace) -> Preset:
    """The parts to measure. Raises `InvalidSetting` for a name that is none."""
    name = options.preset
    if name is None:
        name = "cpu" if describe().device == "cpu" else "gpu-steps"
    if name not in PRESETS:
        raise InvalidSetting(f"{name!r} is no preset; there are {', '.join(PRESETS)}")
    for part in options.parts:
        if part not in PARTS:
            raise InvalidSetting(f"{part!r} is no part; there are {', '.join(PARTS)}")
    preset = PRESETS[name]
    return preset._replace(parts=tuple(options.parts)) if options.parts else preset


def _scale(scale: Scale, options: argparse.Namespace) -> Scale:
    """The preset's sizes with what the command line says otherwise."""
    rate = scale.load.rate if options.rate is None else options.rate
    seed = scale.load.seed if options.seed is None else options.seed
    if not 0.0 <= rate < float("inf"):
        raise InvalidSetting(f"a rate of {rate} arrivals a second; it is 0 (measured) or more")
    if seed < 0:
        raise InvalidSetting(f"a seed of {seed}; it is 0 or more")
    model = LLAMA_8B if options.model == "llama-8b" else options.model
    return scale._replace(
        model=model or scale.model,
        dtype=options.dtype or scale.dtype,
        copies=options.replicate or scale.copies,
        steps=scale.steps._replace(rows=tuple(options.rows or scale.steps.rows)),
        load=scale.load._replace(rate=rate, seed=seed),
    )


def _minutes(preset: Preset) -> str:
    seconds = sum(preset.scale.seconds[part] for part in preset.parts)
    return f"{seconds / 60:.1f} minutes"


def _show(said: Iterable[str]) -> None:
    for line in said:
        print(line, flush=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run(main)
