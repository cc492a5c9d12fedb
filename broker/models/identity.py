"""Who a model is, so that KV of one is never used with another. No MLX.

Content is hashed once: digests are kept in the cache folder and hold as long as a file's size,
inode and times of change do, also the one that nobody can set back. Files of a hub snapshot that
are named by their sha256 are not read at all.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from ..errors import ModelError, ModelUnreadable
from .cache_folder import write_file
from .progress import Progress, ReportProgress

HASH_CHUNK_BYTES = 8 << 20
WEIGHT_FILES = "model*.safetensors"
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.tiktoken",
    "chat_template*",
    "*.jinja",
)


class ModelIdentity(Struct, frozen=True):
    """Digests (sha256, hex) of what decides a model's tokens and KV, and the dtype it computes
    in.

    `adapter` is the digest of an adapter's content, empty without one.
    """

    config: str
    tokenizer: str
    weights: str
    dtype: str
    adapter: str = ""

    @property
    def digest(self) -> str:
        """One sha256 (hex) over all of it."""
        base = [self.config, self.tokenizer, self.weights, self.dtype]
        return digest_of([*base, self.adapter] if self.adapter else base)


class FileStamp(Struct, frozen=True):
    """A file's digest, and the facts that it holds for."""

    size: int
    modified_ns: int
    changed_ns: int
    inode: int
    sha256: str


def namespace_digest(identity: ModelIdentity, *, kv_format: str = "", tenant: str = "") -> str:
    """The name (sha256, hex) of a cache namespace: KV is shared only where all of these agree.

    `kv_format` and `tenant` are empty for the plain case.
    """
    return digest_of([identity.digest, kv_format, identity.adapter, tenant])


def digest_of(parts: Sequence[str]) -> str:
    """sha256 (hex) of a list of strings; no two different lists have the same input."""
    return hashlib.sha256(msgspec.json.encode(list(parts))).hexdigest()


def identity_of(folder: Path, dtype: str, cache: Path, progress: ReportProgress) -> ModelIdentity:
    """The identity of a model directory that computes in `dtype`."""
    config, tokenizer, weights = _files(folder)
    digests = file_digests([*config, *tokenizer, *weights], cache, progress)

    def together(paths: Sequence[Path]) -> str:
        return digest_of([text for path in paths for text in (path.name, digests[path])])

    return ModelIdentity(together(config), together(tokenizer), together(weights), dtype)


def facts_of(folder: Path) -> dict[Path, FileStamp]:
    """What can be seen of a model directory's files without reading them; changes when they do."""
    return {path: _facts(path) for paths in _files(folder) for path in paths}


def file_digests(paths: Sequence[Path], cache: Path, progress: ReportProgress) -> dict[Path, str]:
    """sha256 (hex) of each file, read only if no digest is kept that still holds.

    A cache folder that cannot be written costs the hashing again, nothing else.
    """
    key = digest_of([str(path.absolute()) for path in paths])
    kept_in = cache / "digests" / f"{key}.json"
    kept = _kept(kept_in)
    try:
        stamps = _stamps(paths, kept, progress)
    except OSError as error:
        raise ModelUnreadable(f"cannot read {error.filename}: {error.strerror}") from error
    if stamps != kept:
        try:
            write_file(kept_in, msgspec.json.encode(stamps))
        except ModelError:
            pass
    return {path: stamps[str(path)].sha256 for path in paths}


def _files(folder: Path) -> tuple[list[Path], list[Path], list[Path]]:
    """Configuration, tokenizer and weights."""
    tokenizer = sorted({path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)})
    return [folder / "config.json"], tokenizer, sorted(folder.glob(WEIGHT_FILES))


def _facts(path: Path) -> FileStamp:
    facts = path.stat()
    return FileStamp(facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino, "")


def _kept(path: Path) -> dict[str, FileStamp]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, FileStamp])
    except (OSError, msgspec.DecodeError):
        return {}


def _stamps(
    paths: Sequence[Path], kept: dict[str, FileStamp], progress: ReportProgress
) -> dict[str, FileStamp]:
    total = sum(path.stat().st_size for path in paths)
    done = 0
    stamps = {}
    for path in paths:
        fresh, known = _facts(path), kept.get(str(path))
        if known is not None and msgspec.structs.replace(known, sha256="") == fresh:
            sha256 = known.sha256
        else:
            sha256 = _named_by_content(path) or _hash(path, done, total, progress)
        stamps[str(path)] = msgspec.structs.replace(fresh, sha256=sha256)
        done += fresh.size
    return stamps


def _named_by_content(path: Path) -> str:
    """A hub snapshot links to blobs; those of large files are named by their sha256."""
    blob = path.resolve()
    is_digest = re.fullmatch("[0-9a-f]{64}", blob.name) is not None
    return blob.name if is_digest and blob.parent.name == "blobs" else ""


def _hash(path: Path, done: int, total: int, progress: ReportProgress) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress(Progress("hashing", done, total))
    return digest.hexdigest()
