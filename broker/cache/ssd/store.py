"""The cold store on an SSD: `ColdStore` over a folder of files."""

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from ...errors import ColdStoreBusy, ColdStoreRefused
from ..cold import ColdMatch, ColdWrite, Flushed, Restored
from ..layout import Layout
from ..ledger import Ledger, Purpose, format_bytes
from ..prefix_hash import Tokens
from ..statistics import ColdStatistics
from .disk import Disk
from .files import write_file
from .folder import Folder
from .header import file_bytes
from .lacking import Lacking, files_of, lacking_of
from .names import namespace_key
from .pieces import Pieces, layout_of_write, pieces_of
from .reader import Reader, UnusableFile
from .record import Chain, bytes_of, needed_runs
from .writer import Job, Writer

QUEUE_BYTES = 1 << 30
CLOSE_SECONDS = 10.0
LAST_SECONDS = 5.0
"""How long closing waits for what is being written or read after that."""

_log = logging.getLogger(__name__)


class Match(ColdMatch, frozen=True, kw_only=True):
    """A match and the files that it is read from."""

    chain: Chain


class SsdStore:
    """Sequences in `folder`, at most `max_bytes` of files; a context manager.

    Where another process writes to the folder, or nothing can be written, it only reads. `find`,
    `covers` and `store` are called in the thread that owns MLX, `restore` in any. At most
    `queue_bytes` wait to be written. `ledger` is charged with the copies that wait to be written
    (memory for what is read is the cache's to promise). Files bear the name of `model`, for people.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        *,
        queue_bytes: int = QUEUE_BYTES,
        ledger: Ledger | None = None,
        model: str = "",
        disk: Disk | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._folder = Folder(folder, max_bytes, disk, clock_ns)
        self._ledger = ledger
        self._model = model
        self.models: dict[str, str] = {}
        """The models of namespaces, where that is another one."""
        self._restore_seconds = 0.0
        self._is_failing = False
        self._is_synced = True
        """Whether all names in the folder would survive a crash."""
        self._reader = Reader(self._folder.disk, self._folder.path)
        self._writer = Writer(queue_bytes, self._perform, self._folder.tidy, self._folder.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Reading

    @property
    def losses(self) -> int:
        """How often something was let go."""
        return self._folder.losses

    def find(self, tokens: Tokens, namespace: str, held: int = 0) -> Match | None:
        """The longest prefix of `tokens` that can be restored; [held, length) is to be read."""
        with self._folder.lock:
            best, length = None, 0
            for chain in self._folder.index.chains(namespace_key(namespace), tokens):
                usable = chain.usable(len(tokens))
                if usable > length:
                    best, length = chain, usable
            if best is None:
                return None
            self._folder.counts["hits"] += 1
            return _match(best.cut(length), min(held, length), length)

    def covers(self, tokens: Tokens, namespace: str, is_usable: bool) -> bool:
        """Whether it has all of `tokens`, and can restore exactly those if that is asked for."""
        size = len(tokens)
        with self._folder.lock:
            return any(
                chain.stop == size and (not is_usable or chain.usable(size) == size)
                for chain in self._folder.index.chains(namespace_key(namespace), tokens)
            )

    def restore(self, match: ColdMatch) -> Restored:
        """Read a match. Raises `CacheError` if a file of it is gone, unreadable or corrupt."""
        assert isinstance(match, Match)
        started = time.monotonic()
        folder, records = self._folder, match.chain.records
        with ExitStack() as pins:
            pins.callback(folder.pin(records))
            try:
                row = self._reader.read(match.chain, match.start, match.length)
            except UnusableFile as problem:
                cause = problem.__cause__
                raise folder.reject(problem.record, cause) from cause
            folder.use(records)
        with folder.lock:
            folder.counts["restores"] += 1
            folder.counts["restored_bytes"] += match.bytes
            self._restore_seconds += time.monotonic() - started
        return Restored(row)

    # Writing

    @property
    def is_read_only(self) -> bool:
        """Whether another process writes to the folder, or nothing can be written."""
        return self._folder.is_read_only

    def store(self, write: ColdWrite) -> None:
        """Queue what the store lacks of a write. See `ColdStore.store`."""
        folder = self._folder
        if folder.is_read_only:
            raise ColdStoreRefused(f"{folder.path} is only read by this process")
        layout, tokens, offered = layout_of_write(write), write.tokens, write.lease.ranges
        with folder.lock:
            chain, start = lacking_of(folder.index, write.namespace, tokens, layout, offered)
            if start is None and self._is_synced:
                write.done(None)
                return
            start = len(tokens) if start is None else start
            self._require_room(write, layout, start)
            unpin = folder.pin(chain.records)
        with ExitStack() as undo:
            undo.callback(unpin)
            pieces = pieces_of(write, start)
            undo.callback(self._charge(Purpose.SPILLS, pieces.copied_bytes))
            self._writer.add(Job(write, pieces, undo.pop_all().close))

    def delete(self, match: ColdMatch) -> None:
        """Remove the last file of a match, if it is still there."""
        assert isinstance(match, Match)
        self._folder.remove(match.chain.links[-1].record)

    def flush(self, timeout: float) -> Flushed:
        """Wait until every write that was taken has ended, at most `timeout` seconds."""
        return self._writer.flush(timeout)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Write what is queued within `timeout` seconds, save the index, let the folder go.

        Takes at most `LAST_SECONDS` longer, also where the disk hangs: the folder is let go then
        once the disk answers, or with the process.
        """
        deadline = time.monotonic() + timeout + LAST_SECONDS
        left = self._writer.close(timeout, LAST_SECONDS)
        if left.writes:
            _log.warning(
                "closed %s before %d writes (%s) had ended",
                self._folder.path,
                left.writes,
                format_bytes(left.bytes),
            )
        if not self._reader.close(max(0.0, deadline - time.monotonic())):
            _log.warning("closed %s while the disk hung in a read", self._folder.path)

    # Telling about itself

    def statistics(self) -> ColdStatistics:
        """Sizes and counts."""
        folder = self._folder
        with folder.lock:
            return ColdStatistics(
                files=len(folder.index),
                bytes=folder.index.bytes,
                max_bytes=folder.max_bytes,
                pending_writes=self._writer.pending_writes,
                pending_bytes=self._writer.pending_bytes,
                restore_seconds=self._restore_seconds,
                orphans=folder.index.orphans,
                is_read_only=folder.is_read_only,
                **folder.counts,
            )

    def check_integrity(self) -> None:
        """Assert that the index agrees with itself and with the folder; nothing may be queued."""
        self._folder.check_integrity()

    # The writer's thread

    def _perform(self, job: Job) -> None:
        """Write what is lacking of a job; raises what went wrong."""
        folder = self._folder
        try:
            folder.reopen_if_replaced()
            self._write(job)
        except ColdStoreBusy:
            raise
        except Exception as error:
            folder.counts["write_failures"] += 1
            if not self._is_failing:
                _log.warning("cannot write to %s: %s", folder.path, error)
            self._is_failing = True
            raise
        if self._is_failing:
            _log.warning("writing to %s works again", folder.path)
        self._is_failing = False

    def _write(self, job: Job) -> None:
        folder, pieces = self._folder, job.pieces
        namespace, tokens = job.write.namespace, job.write.tokens
        with ExitStack() as pins:
            with folder.lock:
                lacking = lacking_of(folder.index, namespace, tokens, pieces.layout, pieces.pieces)
                _require_no_gap(lacking, pieces)
                pins.callback(folder.pin(lacking.chain.records))
            for header, rows in files_of(
                lacking, pieces, namespace, tokens, self.models.get(namespace, self._model)
            ):
                folder.make_room(file_bytes(header))
                self._is_synced = False
                write_file(folder.disk, folder.path, header, rows)
                pins.callback(folder.pin([folder.enter(header)]))
            if not self._is_synced:
                folder.disk.sync_folder(folder.path)
                self._is_synced = True

    def _charge(self, purpose: Purpose, size: int) -> Callable[[], None]:
        """Charge bytes that are there anyway, until what is returned is called."""
        ledger = self._ledger
        if ledger is None:
            return lambda: None
        ledger.charge(purpose, size)
        return lambda: ledger.release(purpose, size)

    def _require_room(self, write: ColdWrite, layout: Layout, start: int) -> None:
        size = layout.bytes_per_token * (len(write.tokens) - start) + layout.state_bytes
        if size > self._folder.max_bytes:
            raise ColdStoreRefused(f"{size:,} bytes exceed the cap of {self._folder.max_bytes:,}")
        self._writer.require_room(write.bytes)


def _require_no_gap(lacking: Lacking, pieces: Pieces) -> None:
    """Raise `ColdStoreBusy` if the store lacks more by now than when the write was taken."""
    if lacking.start is not None and lacking.start < pieces.taken:
        span = f"[{lacking.start}, {pieces.taken})"
        raise ColdStoreBusy(f"tokens {span} have left the cold store meanwhile")


def _match(chain: Chain, start: int, length: int) -> Match:
    runs = needed_runs(chain.links, chain.layout, start, length)
    marks = {at: record for at, record in chain.marks.items() if at == length}
    state = chain.layout.state_bytes if marks else 0
    return Match(
        name=f"{chain.links[-1].record.key}:{start}-{length}",
        length=length,
        start=start,
        bytes=bytes_of(chain.layout, runs) + state,
        chain=chain._replace(marks=marks),
    )
