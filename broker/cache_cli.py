"""`mlx-swarm cache`: what is in the cold store, whether it is whole, and how to be rid of it."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .errors import CacheError

if TYPE_CHECKING:
    from .cache.ssd.header import Header

NAME_DIGITS = 16

UNNAMED = "model unknown"
"""Of files that were written before they bore their model's name."""

app = typer.Typer(help="Look into the cold store: KV that is kept on disk.")

FolderOption = Annotated[
    Path | None,
    typer.Option(
        "--folder", "-C", help="The folder that was given as cold.", show_default="the demo's"
    ),
]
Beginning = Annotated[str, typer.Argument(help="How a file's name or a namespace begins.")]


@app.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("ls")
def list_namespaces(folder: FolderOption = None) -> None:
    """List what each namespace has on disk, the last used first.

    A namespace is one model in one form. Files of older versions do not name it.
    """
    from .cache.ledger import format_bytes
    from .cache.ssd.inspection import namespaces

    place = _folder(folder)
    found = namespaces(place)
    if found:
        head = f"{'namespace':<18}{'files':>8}{'tokens':>12}{'size':>12}  {'last used':<16}  model"
        typer.echo(head)
    else:
        typer.echo(f"there is nothing in {place}")
    for each in found:
        used = datetime.fromtimestamp(each.used_ns / 1e9).isoformat(" ", "minutes")
        orphans = f", {each.orphans} without a parent" if each.orphans else ""
        typer.echo(
            f"{each.namespace[:NAME_DIGITS]:<18}{each.files:>8,}{each.tokens:>12,}"
            f"{format_bytes(each.bytes):>12}  {used}  {each.model or UNNAMED}{orphans}"
        )
    _tell_of_quarantine(place)


@app.command("show")
def show(beginning: Beginning, folder: FolderOption = None) -> None:
    """Show what files hold, and on which others they hang."""
    from .cache.ssd.inspection import headers

    for header in headers(_folder(folder), beginning):
        for line in _lines(header):
            typer.echo(line)


@app.command("verify")
def verify(folder: FolderOption = None) -> None:
    """Read every byte and compare the checksums; fails if one is wrong."""
    from .cache.ledger import format_bytes
    from .cache.ssd.inspection import verify as verify_files

    place = _folder(folder)
    verified = verify_files(place)
    for key, fault in verified.faults.items():
        typer.echo(f"{key}: {fault}", err=True)
    whole = _counted(verified.files, "file")
    typer.echo(f"{whole} with {format_bytes(verified.bytes)} {_are(verified.files)} whole")
    if verified.foreign:
        others = _counted(verified.foreign, "file")
        typer.echo(f"{others} {_are(verified.foreign)} of another version or program")
    _tell_of_quarantine(place)
    if faults := len(verified.faults):
        raise CacheError(f"{_counted(faults, 'file')} {_are(faults)} not whole")


@app.command("rm")
def remove(
    beginning: Annotated[str, typer.Argument(help="How a file's name or a namespace begins.")] = "",
    folder: FolderOption = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Remove all files, also those in quarantine.")
    ] = False,
) -> None:
    """Remove files. What hung on them cannot be found any more and goes first later."""
    from .cache.ssd.inspection import remove as remove_files

    if beginning and everything:
        raise CacheError(f"either {beginning!r} or --all can be removed, not both")
    if not beginning and not everything:
        raise CacheError("say what to remove: a beginning, or --all")
    files, quarantined = remove_files(_folder(folder), beginning)
    more = f", and {quarantined:,} in quarantine" if quarantined else ""
    typer.echo(f"removed {_counted(files, 'file')}{more}")


def _folder(given: Path | None) -> Path:
    from .models.cache_folder import kv_folder

    return (given or kv_folder()).expanduser().absolute()


def _tell_of_quarantine(folder: Path) -> None:
    from .cache.ledger import format_bytes
    from .cache.ssd.inspection import quarantine

    files, size = quarantine(folder)
    if files:
        typer.echo(
            f"{_counted(files, 'corrupt file')} with {format_bytes(size)} {_are(files)} in "
            "quarantine: `mlx-swarm cache rm --all` removes them too"
        )


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _lines(header: "Header") -> list[str]:
    """A file in a few lines for people."""
    from .cache.layout import describe
    from .cache.ledger import format_bytes

    parent = "the root" if header.parent == header.namespace else header.parent
    state = " and a checkpoint" if header.has_checkpoint else ""
    return [
        header.key,
        f"  {header.model or UNNAMED}, namespace {header.namespace}, below {parent}",
        f"  tokens [{header.start:,}, {header.stop:,}){state}: "
        f"{format_bytes(header.payload_bytes)} in {_counted(header.block_count, 'block')}",
        f"  {_counted(len(header.layout.nodes), 'cache')}, the first: "
        f"{describe(header.layout.nodes[0])}",
    ]
