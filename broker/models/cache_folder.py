"""The folder for what is fetched, converted or measured once, and all-or-nothing writing into
it."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ModelError

CACHE_VARIABLE = "MLX_SWARM_CACHE"
PARTIAL_PREFIX = ".partial-"
PARTIAL_LIFETIME_SECONDS = 24 * 3600


def cache_folder(given: str | os.PathLike[str] | None = None) -> Path:
    """`given`, else $MLX_SWARM_CACHE, else $XDG_CACHE_HOME/mlx-swarm, else ~/.cache/mlx-swarm.

    Raises `ModelError` where there is no home to be found.
    """
    chosen = given or os.environ.get(CACHE_VARIABLE)
    if not chosen and (base := os.environ.get("XDG_CACHE_HOME")):
        return Path(base) / "mlx-swarm"
    try:
        return Path(chosen or "~/.cache/mlx-swarm").expanduser()
    except RuntimeError as error:
        raise ModelError(
            f"there is no cache folder {chosen or 'without a home'}: set {CACHE_VARIABLE} to one"
        ) from error


def kv_folder() -> Path:
    """Where the command line keeps prompts beyond RAM and restarts."""
    return cache_folder() / "kv"


@contextmanager
def writing_into(parent: Path) -> Iterator[Path]:
    """A scratch folder inside `parent`, removed on the way out whatever happens.

    Every `OSError` of the block (no permission, disk full) becomes a one-line `ModelError`. A
    process that was killed leaves its scratch folder; one older than a day is removed by the next
    writer.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(parent)
        with tempfile.TemporaryDirectory(
            prefix=PARTIAL_PREFIX, dir=parent, ignore_cleanup_errors=True
        ) as scratch:
            yield Path(scratch)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelError(f"cannot write to the cache folder {parent}: {reason}") from error


@contextmanager
def publishing(target: Path) -> Iterator[Path]:
    """A folder to fill that appears as `target` when the block ends, complete or not at all.

    Several processes may do this at once: the first to finish wins, the others drop their equal
    copy.
    """
    with writing_into(target.parent) as scratch:
        folder = scratch / target.name
        folder.mkdir()
        yield folder
        _flush(folder)
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():
                raise


def write_file(target: Path, content: bytes) -> None:
    """Write a small file atomically; raises `ModelError` if it cannot be written."""
    with writing_into(target.parent) as scratch:
        path = scratch / target.name
        path.write_bytes(content)
        path.replace(target)


def _flush(folder: Path) -> None:
    """A file that is renamed before it is on disk can be empty after a power cut."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(f"{PARTIAL_PREFIX}*"):
        try:
            if time.time() - path.stat().st_mtime > PARTIAL_LIFETIME_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
        except FileNotFoundError:
            continue
