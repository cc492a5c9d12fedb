"""The command line, `mlx-swarm`. A command imports what it needs when it runs: help is fast.

Whatever goes wrong on purpose is one line on stderr and an exit code: 1 for a `SwarmError` and for
what the system refuses (a full disk, say), 2 for a command line that cannot be read, 130 for Ctrl-C
and 128 plus the signal for the others, which end a command just as orderly. A second one ends it
at once: see `interrupts`.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module, metadata
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from . import cache_cli, serve_cli
from .errors import SwarmError
from .interrupts import INTERRUPTS

INTERRUPTED = 130
# typer exports one leaf of the errors of its parser; this is what they have in common.
UnreadableCommandLine: Any = typer.BadParameter.__bases__[0]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    """The entry point: run this process's command line and exit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # What a model writes may not exist in the terminal's encoding.
            stream.reconfigure(errors="replace")
    INTERRUPTS.install()
    code = run(sys.argv[1:]) or _write_out()
    INTERRUPTS.finish()
    sys.exit(code if INTERRUPTS.received is None else 128 + INTERRUPTS.received)


def run(arguments: Sequence[str]) -> int:
    """Run a command line; returns its exit code."""
    try:
        return app(args=list(arguments), prog_name="mlx-swarm", standalone_mode=False) or 0
    except UnreadableCommandLine as error:
        return _complain(2, f"{error.format_message()} (see mlx-swarm --help)")
    except typer.Abort:
        return INTERRUPTED
    except SwarmError as error:
        return _complain(1, str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        return _complain(1, _told(error))
    except BaseExceptionGroup as group:
        return _report_group(group)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mlx-swarm {metadata.version('mlx-swarm')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Many agents on one machine for the price of one prefix."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.add_typer(cache_cli.app, name="cache")
app.command("serve")(serve_cli.command())


@app.command()
def demo(
    agents: Annotated[int, typer.Option(help="How many agents run at once.")] = 8,
    model: Annotated[
        str, typer.Option(help="A Hub id, a folder, a .gguf file, or smollm2-135m.")
    ] = "smollm2-135m",
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="The most tokens that an agent writes.", show_default="48; 32 on a slow CPU"
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run a second time without sharing, and compare.")
    ] = False,
    cold: Annotated[
        bool,
        typer.Option(help="Keep the instructions on disk for the next run, unless comparing."),
    ] = True,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; all else goes to stderr.")
    ] = False,
) -> None:
    """Let agents with the same instructions and different tasks write side by side."""
    # The one look upward: agents are a layer above the broker, so they are loaded by name.
    job = import_module("mlx_swarm.agents.demo")
    job.run(
        job.Options(
            agents=agents,
            model=model,
            max_tokens=max_tokens,
            compare=compare,
            cold=cold,
            json=json,
        )
    )


def _report_group(group: BaseExceptionGroup[BaseException]) -> int:
    """Report the first of several errors. Raises the group if it holds a surprise."""
    interrupts, rest = group.split(KeyboardInterrupt)
    if interrupts is not None:
        return INTERRUPTED
    known, surprises = rest.split(SwarmError) if rest is not None else (None, None)
    if known is None or surprises is not None:
        raise group
    first: BaseException = known
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return _complain(1, str(first))


def _write_out() -> int:
    """Write what was printed and is still held back; 1 if that fails, else 0."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        _discard_output()
        return _complain(1, _told(error))
    return 0


def _discard_output() -> None:
    """Have the rest go nowhere: the interpreter writes it again at its end, and would complain."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _told(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{reason}: {error.filename}" if error.filename else reason


def _complain(code: int, message: str) -> int:
    with suppress(OSError):  # there is nobody left to tell
        typer.echo(f"mlx-swarm: {' '.join(message.split())}", err=True)
    return code


if __name__ == "__main__":
    main()
