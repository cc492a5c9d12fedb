"""Looking into a folder of the SSD store from outside, also while a broker uses it."""

from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from ...errors import CacheError, CorruptFile, ForeignFile
from .disk import Disk, Facts
from .files import read_header, verify_file
from .folder import Folder
from .header import Header
from .index import Index
from .names import QUARANTINE, VERSION, key_of, path_of
from .opening import fill
from .record import Record


class NamespaceFiles(Struct, frozen=True, kw_only=True):
    """What a namespace (a digest) has on disk; times in nanoseconds since 1970.

    `model` is the name that its newest file bears, if any.
    """

    namespace: str
    model: str
    files: int
    bytes: int
    tokens: int
    checkpoints: int
    orphans: int
    used_ns: int


class Quarantine(NamedTuple):
    """What was put aside because it is corrupt."""

    files: int
    bytes: int


class Removed(NamedTuple):
    """How many files were removed, and how many more that were in quarantine."""

    files: int
    quarantined: int


class Verified(Struct, frozen=True, kw_only=True):
    """What reading every byte found: how much is right, how many files are of other versions or
    programs, and what is wrong with the rest.
    """

    files: int
    bytes: int
    foreign: int
    faults: dict[str, str]


def namespaces(folder: Path) -> list[NamespaceFiles]:
    """The namespaces in a folder, the last used first."""
    index = _index(folder)
    found: dict[str, list[Record]] = {}
    for record in index:
        found.setdefault(record.namespace, []).append(record)
    summaries = [_summary(folder, name, records, index) for name, records in found.items()]
    return sorted(summaries, key=lambda each: -each.used_ns)


def headers(folder: Path, beginning: str) -> list[Header]:
    """What the files of a name, or of a namespace, say of themselves; a beginning is enough.

    Raises `CacheError` if there is none.
    """
    found = (_header(folder, record) for record in _named(_index(folder), beginning))
    return [header for header in found if header is not None]


def quarantine(folder: Path) -> Quarantine:
    """What is in quarantine."""
    _require_folder(folder)
    sizes = [facts.size for facts in _quarantined(folder)]
    return Quarantine(len(sizes), sum(sizes))


def verify(folder: Path) -> Verified:
    """Read all files, also those that the index does without; changes nothing."""
    _require_folder(folder)
    files = size = foreign = 0
    faults = {}
    keys = (key_of(facts.name) for facts in Disk().entries(folder / VERSION))
    for key in filter(None, keys):
        try:
            described = verify_file(Disk(), _path(folder, key), key)
        except FileNotFoundError:
            # A broker has let it go meanwhile.
            continue
        except ForeignFile:
            foreign += 1
        except (CorruptFile, OSError) as error:
            faults[key] = str(error)
        else:
            files, size = files + 1, size + described.file_bytes
    return Verified(files=files, bytes=size, foreign=foreign, faults=faults)


def remove(folder: Path, beginning: str) -> Removed:
    """Remove the files of a name or of a namespace; for an empty one all, and the quarantine.

    Raises `CacheError` while another process writes to the folder, or if there is no such file.
    """
    _require_folder(folder)
    store = Folder(folder, 1 << 62)
    try:
        if store.is_read_only:
            raise CacheError(f"nothing can be removed from {folder}: {store.reason}")
        found = list(store.index) if not beginning else _named(store.index, beginning)
        for record in found:
            store.remove(record)
        return Removed(len(found), 0 if beginning else _empty_quarantine(folder))
    finally:
        store.close()


def _quarantined(folder: Path) -> list[Facts]:
    with suppress(FileNotFoundError):
        return list(Disk().entries(folder / VERSION / QUARANTINE))
    return []


def _empty_quarantine(folder: Path) -> int:
    aside, found = folder / VERSION / QUARANTINE, _quarantined(folder)
    for facts in found:
        Disk().remove(aside / facts.name)
    with suppress(OSError):  # there is none, or somebody has put something else there
        aside.rmdir()
    return len(found)


def _header(folder: Path, record: Record) -> Header | None:
    """What a file says of itself; None if a broker has let it go meanwhile."""
    disk = Disk()
    with suppress(FileNotFoundError), closing(disk.open(_path(folder, record.key))) as file:
        return read_header(disk, file, record.key, record.size).header
    return None


def _require_folder(folder: Path) -> None:
    if not (folder / VERSION).is_dir():
        raise CacheError(f"there is no cold store in {folder}")


def _index(folder: Path) -> Index:
    _require_folder(folder)
    index = Index()
    fill(index, Disk(), folder / VERSION, may_remove=False)
    return index


def _path(folder: Path, key: str) -> Path:
    return path_of(folder / VERSION, key)


def _named(index: Index, beginning: str) -> list[Record]:
    found = [r for r in index if r.key.startswith(beginning) or r.namespace.startswith(beginning)]
    if not found:
        raise CacheError(f"no file and no namespace begins with {beginning!r}")
    return sorted(found, key=lambda record: (record.namespace, record.start, record.key))


def _summary(folder: Path, namespace: str, records: list[Record], index: Index) -> NamespaceFiles:
    newest = max(records, key=lambda record: record.modified_ns)
    header = None
    with suppress(CacheError, OSError):  # `verify` tells what is wrong with it
        header = _header(folder, newest)
    return NamespaceFiles(
        namespace=namespace,
        model=header.model if header is not None else "",
        files=len(records),
        bytes=sum(record.size for record in records),
        tokens=sum(len(record.tokens) // 4 for record in records),
        checkpoints=sum(record.has_checkpoint for record in records),
        orphans=sum(index.is_orphan(record) for record in records),
        used_ns=max(record.used_ns for record in records),
    )
