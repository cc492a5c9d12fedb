"""Finding out what a folder holds, from the sidecar where it is right, else from headers."""

import gc
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ...errors import CorruptFile, ForeignFile
from . import sidecar
from .disk import Disk, Facts
from .files import read_header
from .index import Index
from .names import SUFFIX, UNFINISHED, key_of
from .record import Record

_log = logging.getLogger(__name__)


class Opened(NamedTuple):
    """How many files were left alone, could not be read, had to be read, and are corrupt."""

    foreign: int
    unreadable: int
    headers_read: int
    corrupt: list[str]


def fill(index: Index, disk: Disk, folder: Path, *, may_remove: bool) -> Opened:
    """Put all files of a folder into an index; remove what a crash left unfinished."""
    # Hundreds of thousands of objects come to stay: looking through them for garbage is in vain.
    with _no_collection():
        return _fill(index, disk, folder, may_remove)


def _fill(index: Index, disk: Disk, folder: Path, may_remove: bool) -> Opened:
    with ThreadPoolExecutor(1) as listing:
        entries = listing.submit(lambda: list(disk.entries(folder)))
        saved = sidecar.load(folder)
    known = {record.key: record for record in saved.records}
    numbers = [index.number_of(layout) for layout in saved.layouts]
    found = _Found(index, disk, folder, known, numbers)
    for facts in entries.result():
        if facts.name.endswith(UNFINISHED):
            if may_remove:
                with suppress(OSError):
                    disk.remove(folder / facts.name)
        else:
            found.take(facts)
    index.fill(found.records)
    return Opened(found.foreign, found.unreadable, found.headers_read, found.corrupt)


@contextmanager
def _no_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Found:
    """What a scan has met so far."""

    def __init__(
        self, index: Index, disk: Disk, folder: Path, known: dict[str, Record], numbers: list[int]
    ) -> None:
        self.records: list[Record] = []
        self.corrupt: list[str] = []
        self.foreign = self.unreadable = self.headers_read = 0
        self._index = index
        self._disk = disk
        self._folder = folder
        self._known = known
        self._numbers = numbers

    def take(self, facts: Facts) -> None:
        """Note one file."""
        record = self._known.get(facts.name.removesuffix(SUFFIX))
        if record is not None and (record.size, record.modified_ns) == facts[1:3]:
            record.layout = self._numbers[record.layout]
            record.used_ns = max(record.used_ns, facts.used_ns)
            self.records.append(record)
            return
        key = key_of(facts.name)
        if key is None:
            return
        self._try(lambda: self.records.append(self._read(key, facts)), key)

    def _try(self, read: Callable[[], None], key: str) -> None:
        try:
            read()
        except ForeignFile as error:
            self.foreign += 1
            _log.info("left %s alone: %s", key, error)
        except CorruptFile:
            self.corrupt.append(key)
        except FileNotFoundError:
            # Another process has removed it meanwhile.
            self.headers_read -= 1
        except OSError as error:
            self.unreadable += 1
            _log.warning("cannot read %s: %s", key, error)

    def _read(self, key: str, facts: Facts) -> Record:
        self.headers_read += 1
        with closing(self._disk.open(self._folder / facts.name)) as file:
            header = read_header(self._disk, file, key, facts.size).header
        return Record.of(
            header,
            self._index.number_of(header.layout),
            size=facts.size,
            modified_ns=facts.modified_ns,
            used_ns=max(facts.used_ns, facts.modified_ns),
        )
