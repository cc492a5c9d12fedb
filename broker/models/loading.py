"""`load`: from what the user wrote to a model in memory."""

import os
import re
from pathlib import Path

from ..errors import ModelNotFound, ModelUnreadable
from . import embedded
from .cache_folder import cache_folder, publishing
from .directory import load_directory
from .gguf_conversion import convert_gguf
from .hub import hub_directory
from .identity import file_digests, identity_of
from .loaded import LoadedModel
from .progress import ReportProgress, ignore_progress
from .reasons import reason_of
from .synthetic import load_synthetic
from .synthetic_spec import PREFIX

CONVERSION_VERSION = 2
LONGEST_NAME = 80
# What begins with a dot is a path, whatever follows.
HUB_ID = re.compile(r"(?!\.)[\w.-]+/[\w.-]+")


def load(
    spec: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    progress: ReportProgress | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> LoadedModel:
    """Load a model in the calling thread, which owns it from then on.

    `spec` is `org/name` on the Hugging Face hub, a directory, a `.gguf` file, `smollm2-135m`, or
    `synthetic:llama?layers=4&...`. `dtype` is float32, float16 or bfloat16; without one, float32 on
    the CPU backend (quantised weights are dequantised there) and as stored elsewhere. What is
    fetched or converted goes to `cache_dir` (see `cache_folder`). Raises `ModelNotFound` or
    `ModelUnreadable`, and `ModelError` for a cache folder that cannot be written.
    """
    if not isinstance(spec, str | os.PathLike):
        raise ModelNotFound(f"no model {spec!r}: a model is named by text or a path")
    try:
        return _load(os.fspath(spec), dtype, progress or ignore_progress, cache_folder(cache_dir))
    except OSError as error:
        raise ModelUnreadable(
            f"cannot read {error.filename or spec}: {error.strerror or reason_of(error)}"
        ) from error


def prepare(
    spec: str,
    *,
    progress: ReportProgress | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> None:
    """Fetch, convert and hash what `load` then only reads. In any thread; raises as `load` does."""
    report, cache = progress or ignore_progress, cache_folder(cache_dir)
    if not spec.startswith(PREFIX):
        folder, _ = _locate(spec, cache, report)
        identity_of(folder, "", cache, report)


def _load(spec: str, dtype: str | None, report: ReportProgress, cache: Path) -> LoadedModel:
    if spec.startswith(PREFIX):
        return load_synthetic(spec, dtype=dtype, conversions=conversions(cache), progress=report)
    folder, name = _locate(spec, cache, report)
    return load_directory(folder, name=name, dtype=dtype, cache=cache, progress=report)


def _locate(spec: str, cache: Path, progress: ReportProgress) -> tuple[Path, str]:
    """The model directory behind `spec`, fetched and converted if need be, and the model's short
    name."""
    if spec == embedded.NAME:
        return embedded.embedded_directory(conversions(cache), progress), spec
    try:
        path = Path(spec).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # a name that is too long, or of no user
        raise ModelNotFound(f"no model {spec[:LONGEST_NAME]!r}: {reason_of(error)}") from error
    if spec and is_folder:
        return path, path.resolve().name
    if is_file and path.suffix == ".gguf":
        return gguf_directory(path, cache, progress), path.stem
    if HUB_ID.fullmatch(spec) and path.suffix != ".gguf":
        return hub_directory(spec, progress), spec
    kind = "is not a .gguf file" if path.exists() else "does not exist"
    raise ModelNotFound(
        f"no model {spec!r}: {path.absolute()} {kind}; a model is org/name, a directory, "
        f"a .gguf file, {embedded.NAME} or {PREFIX}<architecture>"
    )


def gguf_directory(source: Path, cache: Path, progress: ReportProgress) -> Path:
    """The conversion of a GGUF file, named by its content, so that it is made once."""
    [digest] = file_digests([source], cache, progress).values()
    target = conversions(cache) / f"{source.stem[:80]}-{digest[:16]}"
    if not target.is_dir():
        with publishing(target) as scratch:
            convert_gguf(source, scratch, progress)
    return target


def conversions(cache: Path) -> Path:
    """Where converted models are; another version of the conversion does not see them."""
    return cache / "models" / f"v{CONVERSION_VERSION}"
