"""The cold store on an SSD: `ColdStore` over a folder of files."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

from ...errors import CacheError, ColdStoreBusy, ColdStoreRefused, CorruptFile, ForeignFile
from ..cold import ColdMatch, ColdWrite, Flushed, Restored
from ..layout import Layout
from ..prefix_hash import Tokens
from ..statistics import ColdStatistics
from . import sidecar
from .disk import Disk
from .files import write_file
from .header import Header, file_bytes
from .index import Index
from .lacking import Lacking, files_of, lacking_of
from .lock import FolderLock
from .names import QUARANTINE, SUFFIX, VERSION, namespace_key, path_of
from .opening import fill
from .pieces import Pieces, layout_of_write, pieces_of
from .reader import Reader, UnusableFile
from .record import Chain, Record, bytes_of, needed_runs
from .writer import Job, Writer

QUEUE_BYTES = 1 << 30
TOUCH_SECONDS = 60
"""The time of a file's use is written to disk at most so often."""

CLOSE_SECONDS = 10.0
SAVE_EVERY = 1000
"""After so many changes the index is written down while there is nothing else to do."""

_log = logging.getLogger(__name__)


class Match(ColdMatch, frozen=True, kw_only=True):
    """A match and the files that it is read from."""

    chain: Chain


class SsdStore:
    """Sequences in `folder`, at most `max_bytes` of files; a context manager.

    Where another process writes to the folder, or nothing can be written, it only reads. `find`,
    `covers` and `store` are called in the thread that owns MLX, `restore` in any. At most
    `queue_bytes` wait to be written.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        *,
        queue_bytes: int = QUEUE_BYTES,
        disk: Disk | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.folder = folder.expanduser().absolute() / VERSION
        self.max_bytes = max_bytes
        self.is_read_only = False
        self.losses = 0
        self._disk = disk or Disk()
        self._clock_ns = clock_ns
        self._lock = threading.RLock()
        self._index = Index()
        self._counts: Counter[str] = Counter()
        self._restore_seconds = 0.0
        self._touched: dict[str, int] = {}
        self._changes = 0
        self._is_failing = False
        self._is_synced = True
        """Whether all names in the folder would survive a crash."""
        self._folder_lock = FolderLock(self._disk, self.folder)
        self._identity: tuple[int, int] | None = None
        reason = self._open()
        if reason is not None:
            self.is_read_only = True
            _log.warning("%s is only read by this process: %s", self.folder, reason)
        self._reader = Reader(self._disk, self.folder)
        self._writer = Writer(queue_bytes, self._perform, self._tidy)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Reading

    def find(self, tokens: Tokens, namespace: str, held: int = 0) -> Match | None:
        """The longest prefix of `tokens` that can be restored; [held, length) is to be read."""
        with self._lock:
            best, length = None, 0
            for chain in self._index.chains(namespace_key(namespace), tokens):
                usable = chain.usable(len(tokens))
                if usable > length:
                    best, length = chain, usable
            if best is None:
                return None
            self._counts["hits"] += 1
            return _match(best.cut(length), min(held, length), length)

    def covers(self, tokens: Tokens, namespace: str, is_usable: bool) -> bool:
        """Whether it has all of `tokens`, and can restore them if asked for."""
        size = len(tokens)
        with self._lock:
            return any(
                chain.stop == size and (not is_usable or chain.usable(size) == size)
                for chain in self._index.chains(namespace_key(namespace), tokens)
            )

    def restore(self, match: ColdMatch) -> Restored:
        """Read a match. Raises `CacheError` if a file of it is gone, unreadable or corrupt."""
        assert isinstance(match, Match)
        started = time.monotonic()
        try:
            with self._pinned(match.chain):
                row = self._reader.read(match.chain, match.start, match.length)
                self._use(match.chain)
        except UnusableFile as problem:
            raise self._unusable(problem.record, problem.__cause__) from problem.__cause__
        with self._lock:
            self._counts["restores"] += 1
            self._counts["restored_bytes"] += match.bytes
            self._restore_seconds += time.monotonic() - started
        return Restored(row)

    # Writing

    def store(self, write: ColdWrite) -> None:
        """Queue what the store lacks of a write. See `ColdStore.store`."""
        if self.is_read_only:
            raise ColdStoreRefused(f"{self.folder} is only read by this process")
        layout = layout_of_write(write)
        with self._lock:
            offered = write.lease.ranges
            chain, start = lacking_of(self._index, write.namespace, write.tokens, layout, offered)
            if start is None and self._is_synced:
                write.done(None)
                return
            start = len(write.tokens) if start is None else start
            self._require_room(write, layout, start)
            pinned = self._pin(chain)
        try:
            self._writer.add(Job(write, pieces_of(write, start), pinned))
        except BaseException:
            pinned()
            raise

    def delete(self, match: ColdMatch) -> None:
        """Remove the last file of a match, if it is still there."""
        assert isinstance(match, Match)
        with self._lock:
            record = match.chain.links[-1].record
            if self._forget(record) and not self.is_read_only:
                self._disk.remove(path_of(self.folder, record.key))

    def flush(self, timeout: float) -> Flushed:
        """Wait until every write that was taken has ended, at most `timeout` seconds."""
        return self._writer.flush(timeout)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Write what is queued within `timeout` seconds, save the index, let the folder go."""
        self._writer.close(timeout)
        self._reader.close()
        with self._lock:
            self._save()
            self._folder_lock.release()
            self.is_read_only = True

    # Telling about itself

    def statistics(self) -> ColdStatistics:
        """Sizes and counts."""
        with self._lock:
            return ColdStatistics(
                files=len(self._index),
                bytes=self._index.bytes,
                max_bytes=self.max_bytes,
                pending_writes=self._writer.pending_writes,
                pending_bytes=self._writer.pending_bytes,
                restore_seconds=self._restore_seconds,
                orphans=self._index.orphans,
                is_read_only=self.is_read_only,
                **self._counts,
            )

    def check_integrity(self) -> None:
        """Assert that the index agrees with itself and with the folder; nothing may be queued."""
        with self._lock:
            self._index.check_integrity()
            for record in self._index:
                facts = self._disk.facts(path_of(self.folder, record.key))
                assert facts.size == record.size, (facts, record)

    # Opening

    def _open(self) -> str | None:
        """Take hold of the folder as it is now; why it can only be read, if so."""
        self._index = Index()
        self._identity = None
        try:
            self._disk.make_folder(self.folder)
            reason = None if self._folder_lock.take() else "another process writes to it"
        except OSError as error:
            reason = str(error)
        self.is_read_only = reason is not None
        try:
            self._identity = self._disk.identity(self.folder)
            may_remove = not self.is_read_only
            found = fill(self._index, self._disk, self.folder, may_remove=may_remove)
        except OSError as error:
            return str(error)
        self._counts["foreign"] += found.foreign
        self._counts["unreadable"] += found.unreadable
        self._changes += found.headers_read
        for key in found.corrupt:
            self._quarantine(key, "its header is broken")
        return reason

    def _reopen_if_replaced(self) -> None:
        """Start over if the folder is not the one that was opened: it was removed meanwhile."""
        with suppress(FileNotFoundError):
            if self._disk.identity(self.folder) == self._identity:
                return
        with self._lock:
            self.losses += 1
            self._touched.clear()
            reason = self._open()
            # It is tried again at the next write.
            self.is_read_only = False
            if reason is not None:
                raise CacheError(f"{self.folder} was removed and cannot be written: {reason}")
            _log.warning("%s was removed; it is filled anew", self.folder)

    # The writer's thread

    def _perform(self, job: Job) -> None:
        """Write what is lacking of a job; raises what went wrong."""
        try:
            self._reopen_if_replaced()
            self._write(job)
        except ColdStoreBusy:
            raise
        except Exception as error:
            self._counts["write_failures"] += 1
            if not self._is_failing:
                _log.warning("cannot write to %s: %s", self.folder, error)
            self._is_failing = True
            raise
        if self._is_failing:
            _log.warning("writing to %s works again", self.folder)
        self._is_failing = False

    def _write(self, job: Job) -> None:
        namespace, tokens = job.write.namespace, job.write.tokens
        with self._lock:
            layout, offered = job.pieces.layout, job.pieces.pieces
            lacking = lacking_of(self._index, namespace, tokens, layout, offered)
            _require_no_gap(lacking, job.pieces)
            pins = ExitStack()
            pins.callback(self._pin(lacking.chain))
        with pins:
            for header, rows in files_of(lacking, job.pieces, namespace, tokens):
                self._make_room(file_bytes(header))
                self._is_synced = False
                write_file(self._disk, self.folder, header, rows)
                pins.callback(self._enter(header))
            if not self._is_synced:
                self._disk.sync_folder(self.folder)
                self._is_synced = True

    def _enter(self, header: Header) -> Callable[[], None]:
        """Take a new file into the index, pinned until what is returned is called."""
        facts = self._disk.facts(path_of(self.folder, header.key))
        with self._lock:
            now = max(self._clock_ns(), self._index.newest_ns)
            record = Record.of(
                header,
                self._index.number_of(header.layout),
                size=facts.size,
                modified_ns=facts.modified_ns,
                used_ns=now,
            )
            self._index.add(record)
            self._changes += 1
            self._counts["writes"] += 1
            self._counts["written_bytes"] += facts.size
            return self._pin_records({record})

    def _make_room(self, size: int) -> None:
        """Remove files until so many bytes more are within the cap."""
        with self._lock:
            while self._index.bytes + size > self.max_bytes:
                victim = self._index.victim()
                if victim is None:
                    raise CacheError(
                        f"{size:,} bytes do not fit: the cap is {self.max_bytes:,}, and what is "
                        "there is in use"
                    )
                self._disk.remove(path_of(self.folder, victim.key))
                self._forget(victim)
                self._counts["evicted"] += 1

    def _tidy(self) -> None:
        if self._changes >= SAVE_EVERY:
            with self._lock:
                self._save()

    # Helpers

    def _require_room(self, write: ColdWrite, layout: Layout, start: int) -> None:
        size = layout.bytes_per_token * (len(write.tokens) - start) + layout.state_bytes
        if size > self.max_bytes:
            raise ColdStoreRefused(f"{size:,} bytes exceed the cap of {self.max_bytes:,}")
        self._writer.require_room(write.bytes)

    def _pin(self, chain: Chain) -> Callable[[], None]:
        """Keep the files of a chain until what is returned is called."""
        return self._pin_records({*(link.record for link in chain.links), *chain.marks.values()})

    def _pin_records(self, records: set[Record]) -> Callable[[], None]:
        index = self._index
        for record in records:
            index.pin(record)

        def unpin() -> None:
            with self._lock:
                for record in records:
                    index.unpin(record)

        return unpin

    @contextmanager
    def _pinned(self, chain: Chain) -> Iterator[None]:
        with self._lock:
            records = [*(link.record for link in chain.links), *chain.marks.values()]
            gone = [record for record in records if record.key not in self._index]
            if gone:
                raise CacheError(f"{gone[0].key} is gone")
            unpin = self._pin(chain)
        try:
            yield
        finally:
            unpin()

    def _use(self, chain: Chain) -> None:
        """Note that files were used, on disk too if that was not done lately."""
        with self._lock:
            now = max(self._clock_ns(), self._index.newest_ns)
            for link in chain.links:
                record = link.record
                self._index.use(record, now)
                stale = now - self._touched.get(record.key, 0) >= TOUCH_SECONDS * 1_000_000_000
                if stale and not self.is_read_only:
                    self._touched[record.key] = now
                    with suppress(OSError):
                        path = path_of(self.folder, record.key)
                        self._disk.touch(path, now, record.modified_ns)

    def _unusable(self, record: Record, cause: BaseException | None) -> CacheError:
        """Forget a file that could not be read, and move it aside if it is corrupt."""
        with self._lock:
            if isinstance(cause, CorruptFile):
                self._forget(record)
                self._quarantine(record.key, str(cause))
                return CorruptFile(f"{record.key}: {cause}")
            if self._forget(record):
                kind = "foreign" if isinstance(cause, ForeignFile) else "unreadable"
                self._counts[kind] += 1
                _log.warning("%s cannot be used: %s", record.key, cause)
            return CacheError(f"{record.key} cannot be used: {cause}")

    def _quarantine(self, key: str, reason: str) -> None:
        self._counts["quarantined"] += 1
        if self.is_read_only:
            _log.warning("%s is corrupt: %s", key, reason)
            return
        _log.warning("%s is corrupt and put into quarantine: %s", key, reason)
        aside = self.folder / QUARANTINE
        try:
            self._disk.make_folder(aside)
            self._disk.replace(path_of(self.folder, key), aside / f"{key}{SUFFIX}")
        except OSError as error:
            _log.warning("%s cannot be moved: %s", key, error)

    def _forget(self, record: Record) -> bool:
        """Take a file out of the index; whether it was there."""
        if self._index.get(record.key) is not record:
            return False
        self._index.remove(record)
        self._touched.pop(record.key, None)
        self._changes += 1
        self.losses += 1
        return True

    def _save(self) -> None:
        if self.is_read_only or not self._changes:
            return
        try:
            sidecar.save(self._disk, self.folder, self._index)
        except OSError as error:
            _log.warning("cannot save the index of %s: %s", self.folder, error)
        self._changes = 0


def _require_no_gap(lacking: Lacking, pieces: Pieces) -> None:
    """Raise `ColdStoreBusy` if the store lacks more by now than when the write was taken."""
    chain, start = lacking
    if start is None or (pieces.pieces and pieces.pieces[0].start <= start <= chain.stop):
        return
    if not pieces.pieces and start == chain.stop:
        return
    raise ColdStoreBusy(f"what precedes token {start} has left the cold store meanwhile")


def _match(chain: Chain, start: int, length: int) -> Match:
    runs = needed_runs(chain.links, chain.layout, start, length)
    state = chain.layout.state_bytes if length in chain.marks else 0
    return Match(
        name=f"{chain.links[-1].record.key}:{start}-{length}",
        length=length,
        start=start,
        bytes=bytes_of(chain.layout, runs) + state,
        chain=chain,
    )
