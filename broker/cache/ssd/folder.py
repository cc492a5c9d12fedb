"""A folder of files and the index of it, which agree whatever happens to either. No MLX."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from ...errors import CacheError, CorruptFile, ForeignFile
from . import sidecar
from .disk import Disk
from .header import Header
from .index import Index
from .lock import FolderLock
from .names import QUARANTINE, SUFFIX, VERSION, path_of
from .opening import fill
from .record import Record

TOUCH_SECONDS = 60
"""The time of a file's use is written to disk at most so often."""

QUARANTINE_SHARE = 10
"""Files in quarantine may take this part of the cap when the folder is opened; older ones go."""

TOLD = 10
"""So many broken files are named when the folder is opened; the others are only counted."""

SAVE_EVERY = 1000
"""After so many changes the index is worth writing down, or after this share of its files."""
SAVE_SHARE = 4

_log = logging.getLogger(__name__)


class Folder:
    """The files of a store, at most `max_bytes` of them.

    Everything is done under `lock`, which may be taken again by who has it. Where another process
    has the folder, or it cannot be written, it `is_read_only`; without the lock nothing is changed.
    """

    def __init__(
        self,
        parent: Path,
        max_bytes: int,
        disk: Disk | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.path = parent.expanduser().absolute() / VERSION
        self.max_bytes = max_bytes
        self.disk = disk or Disk()
        self.lock = threading.RLock()
        self.index = Index()
        self.counts: Counter[str] = Counter()
        self.losses = 0
        self.is_read_only = False
        self._clock_ns = clock_ns
        self._touched: dict[str, int] = {}
        self._changes = 0
        self._folder_lock = FolderLock(self.disk, self.path)
        self.reason = self._open()
        """Why it can only be read, if so."""
        if self.reason is not None:
            self.is_read_only = True
            told = "nothing will be kept in %s: %s"
            if self.path.is_dir():
                told = "nothing will be kept in %s, which is only read: %s"
            _log.warning(told, self.path, self.reason)

    def path_of(self, key: str) -> Path:
        """Where a file is."""
        return path_of(self.path, key)

    def reopen_if_replaced(self) -> None:
        """Start over if the folder is not the one that was locked: it was removed meanwhile.

        Raises `CacheError` if that cannot be.
        """
        if self._folder_lock.is_held:
            return
        with self.lock:
            self.losses += 1
            self._touched.clear()
            reason = self._open()
            # It is tried again at the next write.
            self.is_read_only = False
        if reason is not None:
            raise CacheError(f"{self.path} was removed, and {reason}")
        _log.warning("%s was removed; it is filled anew", self.path)

    def enter(self, header: Header) -> Record:
        """Take a new file into the index."""
        with self.lock:
            facts = self.disk.facts(self.path_of(header.key))
            record = Record.of(
                header,
                self.index.number_of(header.layout),
                size=facts.size,
                modified_ns=facts.modified_ns,
                used_ns=self._now_ns(),
            )
            self.index.add(record)
            self._changes += 1
            self.counts["writes"] += 1
            self.counts["written_bytes"] += facts.size
            return record

    def make_room(self, size: int) -> None:
        """Remove files until so many bytes more are within the cap; raises if they cannot be."""
        while (victim := self._victim(size)) is not None:
            self.disk.remove(self.path_of(victim.key))

    def remove(self, record: Record) -> None:
        """Remove a file, if it is still there and may be."""
        with self.lock:
            # One written meanwhile under the same name is removed before it is entered, or not.
            if self.forget(record) and self._folder_lock.is_held:
                self.disk.remove(self.path_of(record.key))

    def forget(self, record: Record) -> bool:
        """Take a file out of the index; whether it was there."""
        with self.lock:
            if self.index.get(record.key) is not record:
                return False
            self.index.remove(record)
            self._touched.pop(record.key, None)
            self._changes += 1
            self.losses += 1
            return True

    def reject(self, record: Record, cause: BaseException | None) -> CacheError:
        """Forget a file that could not be read, move it aside if it is corrupt; what to raise."""
        with self.lock:
            was_there = self.forget(record)
            # Without the lock: another process may have written it anew.
            if isinstance(cause, CorruptFile) and self._folder_lock.is_held:
                if was_there:
                    self._quarantine(record.key, str(cause))
                return CorruptFile(f"{record.key}: {cause}")
            if was_there:
                kind = "foreign" if isinstance(cause, ForeignFile) else "unreadable"
                self.counts[kind] += 1
                _log.warning("%s cannot be used: %s", record.key, cause)
            return CacheError(f"{record.key} cannot be used: {cause}")

    def use(self, records: Iterable[Record]) -> None:
        """Note that files were used, on disk too if that was not done lately."""
        stale = []
        with self.lock:
            now = self._now_ns()
            for record in records:
                self.index.use(record, now)
                if now - self._touched.get(record.key, 0) >= TOUCH_SECONDS * 1_000_000_000:
                    self._touched[record.key] = now
                    stale.append(record)
        # A disk that is busy takes its time, and nobody who looks something up is to wait for it.
        for record in stale if self._folder_lock.is_held else ():
            with suppress(OSError):
                self.disk.touch(self.path_of(record.key), now, record.modified_ns)

    def pin(self, records: Iterable[Record]) -> Callable[[], None]:
        """Keep files until what is returned is called. Raises `CacheError` if one is gone."""
        with self.lock:
            index, kept = self.index, list(records)
            for record in kept:
                if record.key not in index:
                    raise CacheError(f"{record.key} is gone")
            for record in kept:
                index.pin(record)

        def unpin() -> None:
            with self.lock:
                for record in kept:
                    index.unpin(record)

        return unpin

    def tidy(self) -> None:
        """Write the index down if much has changed since."""
        if self._changes >= max(SAVE_EVERY, len(self.index) // SAVE_SHARE):
            self._save()

    def close(self) -> None:
        """Write the index down, let another process have the folder."""
        if self._changes:
            self._save()
        with self.lock:
            self._folder_lock.release()
            self.is_read_only = True

    def check_integrity(self) -> None:
        """Assert that the index agrees with itself and with the files."""
        with self.lock:
            self.index.check_integrity()
            for record in self.index:
                facts = self.disk.facts(self.path_of(record.key))
                assert facts.size == record.size, (facts, record)

    def _open(self) -> str | None:
        """Take hold of the folder as it is now; why it can only be read, if so."""
        self.index = Index()
        try:
            self.disk.make_folder(self.path)
            reason = None if self._folder_lock.take() else "another process writes to it"
        except OSError as error:
            reason = f"it cannot be written ({error.strerror or error})"
        self.is_read_only = reason is not None
        try:
            found = fill(self.index, self.disk, self.path, may_remove=not self.is_read_only)
        except OSError as error:
            self._folder_lock.release()
            return reason or str(error)
        self.counts["foreign"] += found.foreign
        self.counts["unreadable"] += found.unreadable
        self._changes += found.headers_read
        for key in found.corrupt[:TOLD]:
            self._quarantine(key, "its header is broken")
        for key in found.corrupt[TOLD:]:
            self._quarantine(key, "its header is broken", logging.DEBUG)
        if len(found.corrupt) > TOLD:
            _log.warning("so are %d more files of %s", len(found.corrupt) - TOLD, self.path)
        if reason is None:
            self._shrink()
            self._shrink_quarantine()
        return reason

    def _shrink(self) -> None:
        """Remove what exceeds the cap: it may have been higher when that was written."""
        evicted = self.counts["evicted"]
        try:
            self.make_room(0)
        except (OSError, CacheError) as error:
            _log.warning("%s cannot be brought within its cap: %s", self.path, error)
        if self.counts["evicted"] > evicted:
            _log.info(
                "removed %d files of %s, which exceeded its cap of %d bytes",
                self.counts["evicted"] - evicted,
                self.path,
                self.max_bytes,
            )

    def _shrink_quarantine(self) -> None:
        aside = self.path / QUARANTINE
        left = self.max_bytes // QUARANTINE_SHARE
        with suppress(OSError):
            newest_first = sorted(self.disk.entries(aside), key=lambda facts: -facts.modified_ns)
            for facts in newest_first:
                left -= facts.size
                if left < 0:
                    self.disk.remove(aside / facts.name)

    def _victim(self, size: int) -> Record | None:
        """Forget the next file that has to go for `size` bytes more; None if they fit.

        Files are removed without the lock: nobody who looks something up waits for that.
        """
        with self.lock:
            if self.index.bytes + size <= self.max_bytes:
                return None
            victim = self.index.victim()
            if victim is None:
                raise CacheError(
                    f"{size:,} bytes do not fit: the cap is {self.max_bytes:,}, and the "
                    f"{self.index.bytes:,} that are there are in use"
                )
            self.forget(victim)
            self.counts["evicted"] += 1
            return victim

    def _save(self) -> None:
        with self.lock:
            if not self._folder_lock.is_held:
                return
            layouts, records = tuple(self.index.layouts), list(self.index)
            self._changes = 0
        try:
            sidecar.save(self.disk, self.path, layouts, records)
        except OSError as error:
            _log.warning("cannot save the index of %s: %s", self.path, error)

    def _quarantine(self, key: str, reason: str, level: int = logging.WARNING) -> None:
        self.counts["quarantined"] += 1
        if not self._folder_lock.is_held:
            _log.log(level, "%s is corrupt: %s", key, reason)
            return
        _log.log(level, "%s is corrupt and put into quarantine: %s", key, reason)
        aside = self.path / QUARANTINE
        try:
            self.disk.make_folder(aside)
            self.disk.replace(self.path_of(key), aside / f"{key}{SUFFIX}")
        except OSError as error:
            _log.log(level, "%s cannot be moved: %s", key, error)

    def _now_ns(self) -> int:
        """A time that never goes back behind any use."""
        return max(self._clock_ns(), self.index.newest_ns)
