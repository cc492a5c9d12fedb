"""`mlx-swarm cache`: what is in the cold store, whether it is whole, and how to be rid of it."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .errors import CacheError

if TYPE_CHECKING:
    from .cache.ssd.header import Header

NAME_DIGITS = 16

app = typer.Typer(no_args_is_help=True, help="Look into the cold store: KV that is kept on disk.")

FolderOption = Annotated[
    Path | None,
    typer.Option(
        "--folder", "-C", help="The folder that was given as cold.", show_default="the demo's"
    ),
]
Beginning = Annotated[str, typer.Argument(help="How a file's name or a namespace begins.")]


@app.command("ls")
def list_namespaces(folder: FolderOption = None) -> None:
    """List what each namespace has on disk, the last used first."""
    from .cache.ledger import format_bytes
    from .cache.ssd.inspection import namespaces

    typer.echo(f"{'namespace':<18}{'files':>8}{'tokens':>12}{'size':>12}  last used")
    for each in namespaces(_folder(folder)):
        used = datetime.fromtimestamp(each.used_ns / 1e9).isoformat(" ", "minutes")
        orphans = f", {each.orphans} without a parent" if each.orphans else ""
        typer.echo(
            f"{each.namespace[:NAME_DIGITS]:<18}{each.files:>8,}{each.tokens:>12,}"
            f"{format_bytes(each.bytes):>12}  {used}{orphans}"
        )


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

    verified = verify_files(_folder(folder))
    for key, fault in verified.faults.items():
        typer.echo(f"{key}: {fault}", err=True)
    typer.echo(f"{verified.files:,} files with {format_bytes(verified.bytes)} are whole")
    if verified.foreign:
        typer.echo(f"{verified.foreign:,} files are of another version or program")
    if verified.faults:
        raise CacheError(f"{len(verified.faults):,} files are not")


@app.command("rm")
def remove(
    beginning: Annotated[str, typer.Argument(help="How a file's name or a namespace begins.")] = "",
    folder: FolderOption = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all files.")] = False,
) -> None:
    """Remove files. What hung on them cannot be found any more and goes first later."""
    from .cache.ssd.inspection import remove as remove_files

    if bool(beginning) == everything:
        raise CacheError("say what to remove: a beginning, or --all")
    typer.echo(f"removed {remove_files(_folder(folder), beginning):,} files")


def _folder(given: Path | None) -> Path:
    from .models.cache_folder import kv_folder

    return (given or kv_folder()).expanduser().absolute()


def _lines(header: "Header") -> list[str]:
    """A file in a few lines for people."""
    from .cache.layout import describe
    from .cache.ledger import format_bytes

    parent = "the root" if header.parent == header.namespace else header.parent
    state = " and a checkpoint" if header.has_checkpoint else ""
    return [
        header.key,
        f"  namespace {header.namespace}, below {parent}",
        f"  tokens [{header.start:,}, {header.stop:,}){state}: "
        f"{format_bytes(header.payload_bytes)} in {header.block_count:,} blocks",
        f"  {len(header.layout.nodes)} caches, the first: {describe(header.layout.nodes[0])}",
    ]
