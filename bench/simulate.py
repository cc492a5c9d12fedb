"""`python -m bench.simulate`: an engine under load in minutes, with a cost model instead of MLX.

The scheduler, the prefix tree, the prompt cache with its eviction and the memory ledger are the
real ones; computing, storing and reading take what the costs say, on a clock of its own. So ten
thousand agents or a day's trace take minutes. The same seed gives the same figures.

    python -m bench.simulate swarm --agents 10000 --rate 20 --profile h200-8b
    python -m bench.simulate sessions --agents 100 --times 3 --ram 4GiB --cold 100GiB
    python -m bench.simulate trace shared/traces/conversation_trace.jsonl --ram 40GiB
    python -m bench.simulate calibrate --json costs.json
    python -m bench.simulate check --costs costs.json

`calibrate` measures the costs on this machine, `check` plays the same sessions to a real broker and
says how far off the simulation is.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from bench.runner import machine, positive, run
from bench.simulate_calibrate import CalibrateSizes, calibrate
from bench.simulate_check import Checked, check
from bench.simulate_costs import PROFILES, Costs, named
from bench.simulate_engine import Sizes
from bench.simulate_findings import Record, Simulated, lines, simulated
from bench.simulate_presets import checks
from bench.simulate_run import play
from bench.simulate_workload import (
    Session,
    SessionSizes,
    SwarmSizes,
    sessions,
    swarm,
    trace,
)
from bench.swarm_presets import SMALL
from bench.swarm_records import today
from bench.swarm_setup import prepare
from mlx_swarm.broker.errors import InvalidSetting
from mlx_swarm.broker.sizes import parse_size

AGENTS = 1000


def main(arguments: Sequence[str] | None = None) -> list[Record]:
    """Simulate, calibrate or check as the command line asks for; print what was found."""
    options = _parser().parse_args(arguments)
    if options.what == "calibrate":
        _calibrate(options)
        return []
    costs = named(options.profile, options.costs)
    made = list(_checked(options, costs) if options.what == "check" else _played(options, costs))
    for record in made:
        _show(record)
        if options.json is not None:
            with open(options.json, "ab") as file:
                file.write(msgspec.json.encode(record) + b"\n")
    return made


def _played(options: argparse.Namespace, costs: Costs) -> Iterator[Record]:
    began = time.perf_counter()
    outcome = play(_sessions(options, costs), costs, _sizes(options))
    outcome.engine.check_idle()
    found = simulated(_told(options), outcome, costs)
    yield _record(costs, found, time.perf_counter() - began)


def _sessions(options: argparse.Namespace, costs: Costs) -> Iterator[Session]:
    match options.what:
        case "swarm":
            return swarm(
                options.seed,
                SwarmSizes(
                    options.agents or AGENTS,
                    options.sets,
                    options.turns,
                    tuple(options.instructions),
                    tuple(options.ask),
                    tuple(options.answer),
                    options.pause,
                    options.rate,
                    options.tenants,
                    options.urgent,
                    options.deadline,
                ),
            )
        case "sessions":
            ram = parse_size(options.ram) // costs.bytes_per_token
            answer = sum(options.answer) // 2
            sizes = SessionSizes(
                options.agents or AGENTS, ram, options.times, options.turns, answer, options.pause
            )
            return sessions(options.seed, sizes)
        case _:
            return trace(options.file, options.agents, options.speed)


def _sizes(options: argparse.Namespace) -> Sizes:
    ram, memory, cold = (parse_size(each) for each in (options.ram, options.memory, options.cold))
    return Sizes(ram, memory, cold, options.max_rows, options.chunk, options.max_queue)


def _told(options: argparse.Namespace) -> str:
    """The command line's settings, for the record."""
    left_out = {"json", "costs"} if options.costs is None else {"json"}
    given = vars(options).items()
    return ", ".join(f"{name} {value}" for name, value in given if name not in left_out)


def _checked(options: argparse.Namespace, costs: Costs) -> Iterator[Record]:
    setup = prepare(options.model, options.dtype, ram="1GiB", copies=0)
    unit = setup.layout.bytes_per_token
    if costs.bytes_per_token != unit:
        raise InvalidSetting(
            f"the costs are for {costs.bytes_per_token:,} bytes a token; {options.model} has "
            f"{unit:,}"
        )
    for case in checks(unit, int(setup.loaded.config["vocab_size"]), options.seed):
        began = time.perf_counter()
        found = check(case.name, setup, costs, case.sizes, case.sessions)
        yield _record(costs, found, time.perf_counter() - began)


def _calibrate(options: argparse.Namespace) -> None:
    setup = prepare(options.model, options.dtype, ram="1GiB", copies=0)
    costs = calibrate(setup, CalibrateSizes(), options.folder)
    found = msgspec.json.format(msgspec.json.encode(costs))
    if options.json is not None:
        options.json.write_bytes(found + b"\n")
    sys.stdout.write(found.decode() + "\n")


def _record(costs: Costs, found: Simulated | Checked, took: float) -> Record:
    return Record(date=today(), machine=machine(), costs=costs, took=took, found=found)


def _show(record: Record) -> None:
    found = record.found
    shown = Table(title=found.workload, title_justify="left", show_header=False)
    for name, value in (*lines(found), ("took here", f"{record.took:,.1f} s")):
        shown.add_row(name, value)
    console = Console()
    console.print(shown, highlight=False)
    for bar in found.bars() if isinstance(found, Checked) else ():
        console.print(str(bar), highlight=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", type=Path, help="add the records (or write the costs) there")
    common.add_argument("--seed", type=positive, default=1)
    common.add_argument("--profile", default="cpu-small", help=", ".join(PROFILES))
    common.add_argument("--costs", type=Path, help="a file that `calibrate` wrote")
    model = argparse.ArgumentParser(add_help=False)
    model.add_argument("--model", default=SMALL)
    model.add_argument("--dtype", default="float32")
    model.add_argument("--folder", type=Path, help="on the disk to be measured")
    parts = parser.add_subparsers(dest="what", required=True)
    played = [common, _engine_options(), _session_options()]
    parts.add_parser("swarm", parents=played, help="agents with instructions in common")
    alone = parts.add_parser("sessions", parents=played, help="transcripts larger than RAM")
    alone.add_argument(
        "--times", type=float, default=3.0, help="of RAM that they take at their end"
    )
    file = parts.add_parser("trace", parents=played, help="a file of requests as block ids")
    file.add_argument("file", type=Path)
    file.add_argument("--speed", type=float, default=1.0, help="how much faster time runs in it")
    parts.add_parser("calibrate", parents=[common, model], help="measure the costs here")
    parts.add_parser("check", parents=[common, model], help="compare with a real broker")
    return parser


def _engine_options() -> argparse.ArgumentParser:
    """The settings of a broker, by the same names."""
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--ram", default="2GiB")
    options.add_argument("--memory", default="0", help="for everything; 0 for no limit")
    options.add_argument("--cold", default="0", help="0 for no tier below")
    options.add_argument("--max-rows", type=positive, default=32)
    options.add_argument("--max-queue", type=positive, default=1024)
    options.add_argument("--chunk", type=positive, help="tokens, instead of sized by time")
    return options


def _session_options() -> argparse.ArgumentParser:
    """What agents do; pairs are from and to how many tokens, drawn anew each time."""
    usual = SwarmSizes(0)
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--agents", type=positive, help="sessions or requests; 1,000, or all")
    options.add_argument("--turns", type=positive, default=usual.turns)
    options.add_argument("--sets", type=positive, default=usual.sets, help="of instructions")
    for name in ("instructions", "ask", "answer"):
        usually = getattr(usual, name)
        options.add_argument(f"--{name}", type=positive, nargs=2, default=usually, metavar="N")
    options.add_argument("--pause", type=float, default=usual.pause, help="mean seconds of a tool")
    options.add_argument(
        "--rate", type=float, default=0.0, help="arrivals a second; 0: all at once"
    )
    options.add_argument("--tenants", type=positive, default=1)
    options.add_argument("--urgent", type=int, default=0, help="one agent in so many")
    options.add_argument("--deadline", type=float, help="seconds for every turn")
    return options


if __name__ == "__main__":
    run(main)
