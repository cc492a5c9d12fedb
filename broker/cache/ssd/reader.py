"""Reading a chain of files into one extent: several threads check blocks and place their rows.

One more thread is the only one of the store that runs MLX, on a stream of its own; only evaluated
arrays leave it.
"""

import os
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import wait
from contextlib import closing, suppress
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ...errors import ForeignFile, SwarmError
from ...threads import Threads
from ..dtypes import dtype_of
from ..extents import Extent
from ..kinds import Checkpoint
from ..layout import Layout
from ..runs import Runs, count_runs, intersect_runs
from .disk import Disk
from .files import check_block, read_block, read_header
from .header import Block, Described
from .names import path_of
from .pieces import is_host_memory, raw_type
from .record import Chain, Link, Record, bytes_of, needed_runs
from .restored import RestoredRow

THREADS = min(4, os.cpu_count() or 1)
"""Memory that is touched for the first time takes longer than reading: more than one helps."""


class UnusableFile(Exception):
    """A file of a chain cannot be read; the cause says why."""

    def __init__(self, record: Record) -> None:
        super().__init__(record.key)
        self.record = record


class Reader:
    """Reads chains, one after the other; may be called in any thread."""

    def __init__(self, disk: Disk, folder: Path) -> None:
        self._disk = disk
        self._folder = folder
        self._restoring = Threads(1, "mlx-swarm-restore")
        self._placing = Threads(THREADS, "mlx-swarm-place")
        self._stream: Any = None

    def read(self, chain: Chain, start: int, length: int) -> RestoredRow:
        """Tokens [start, length) of a chain, and the checkpoint there; raises `UnusableFile`."""
        return self._restoring.submit(self._read, chain, start, length).result()

    def close(self, timeout: float) -> bool:
        """Finish what is being read and end all threads; False if that takes longer."""
        # Those who place end after who reads, whenever that is.
        with suppress(RuntimeError):
            self._restoring.submit(self._placing.close, timeout)
        return self._restoring.close(timeout)

    def _read(self, chain: Chain, start: int, length: int) -> RestoredRow:
        if self._stream is None:
            self._stream = mx.new_stream(mx.default_device())
        layout, links = chain.layout, chain.links
        runs = needed_runs(links, layout, start, length)
        mark = chain.marks.get(length)
        if 2 * bytes_of(layout, runs) >= sum(record.size for record in chain.records):
            # The disk is busy while memory is touched for the first time, which takes as long.
            for record in chain.records:
                self._placing.submit(self._expect, record)
        with mx.stream(self._stream):
            kv = [
                _Target(
                    (len(group.members), group.plane.heads, count_runs(held), group.plane.dim),
                    dtype_of(group.plane.dtype),
                    is_token_major=False,
                )
                for group, held in zip(layout.groups, runs, strict=True)
            ]
            state = [
                _Target((len(group.members), *group.slot.shape), dtype_of(group.slot.dtype))
                for group in (layout.state_groups if mark is not None else ())
            ]
            parts = [*_parts_of_links(links, kv, runs), *_parts_of_mark(mark, state)]
            self._fill(parts, layout)
            buffers = tuple(target.finish() for target in kv)
            states = tuple(target.finish() for target in state)
            mx.eval(buffers, states)
        extent = Extent(layout, start, length, buffers, runs) if start < length else None
        checkpoint = Checkpoint(layout, states) if mark is not None else None
        return RestoredRow(layout, length, extent, checkpoint)

    def _expect(self, record: Record) -> None:
        with suppress(OSError):
            self._disk.expect(path_of(self._folder, record.key))

    def _fill(self, parts: Sequence["_Part"], layout: Layout) -> None:
        filling = _Filling(self._disk, self._folder, parts, layout)
        work = [self._placing.submit(filling.run) for _ in range(THREADS)]
        # Nobody may still write to what is given up.
        wait(work)
        for each in work:
            each.result()


class _Wanted(NamedTuple):
    """A block that has something of a part, and the open file it is in."""

    part: "_Part"
    block: Block
    file: FileIO
    described: Described


class _Filling:
    """Parts being filled by several threads: one at a time reads, as disks like it, while the
    others check and place what they have read.
    """

    def __init__(self, disk: Disk, folder: Path, parts: Sequence["_Part"], layout: Layout) -> None:
        self._disk = disk
        self._folder = folder
        self._layout = layout
        self._reading = threading.Lock()
        self._wanted = self._walk(parts)

    def run(self) -> None:
        """Place blocks until none is left or one is unusable; raises `UnusableFile` then."""
        memory = bytearray()
        while True:
            with self._reading:
                wanted = next(self._wanted, None)
                if wanted is None:
                    return
                if len(memory) < wanted.block.size:
                    memory = bytearray(wanted.block.size)
                data = self._read(wanted, memoryview(memory))
            try:
                check_block(wanted.described, wanted.block, data)
            except SwarmError as error:
                self._give_up()
                raise UnusableFile(wanted.part.record) from error
            wanted.part.place(wanted.block, data)

    def _walk(self, parts: Sequence["_Part"]) -> Generator[_Wanted]:
        """Every block that is needed, in order."""
        for record, group in _by_file(parts):
            try:
                with closing(self._disk.open(path_of(self._folder, record.key))) as file:
                    described = _described(self._disk, file, record, self._layout)
                    for part, block in _wanted(described, group):
                        yield _Wanted(part, block, file, described)
            except (OSError, SwarmError) as error:
                raise UnusableFile(record) from error

    def _read(self, wanted: _Wanted, memory: memoryview) -> memoryview:
        try:
            return read_block(self._disk, wanted.file, wanted.described, wanted.block, memory)
        except (OSError, SwarmError) as error:
            self._wanted.close()
            raise UnusableFile(wanted.part.record) from error

    def _give_up(self) -> None:
        with self._reading:
            self._wanted.close()


class _Target:
    """A buffer to be filled with rows; token-major, or `[planes, heads, tokens, dim]`."""

    def __init__(
        self, shape: tuple[int, ...], dtype: mx.Dtype, *, is_token_major: bool = True
    ) -> None:
        self._dtype = dtype
        raw = raw_type(dtype.size)
        self._owner: mx.array | None = None
        if is_host_memory():
            self._owner = mx.zeros(shape, raw)
            mx.eval(self._owner)
            self._host: NDArray[Any] = np.array(self._owner, copy=False)
        else:
            self._host = np.empty(shape, np.dtype(f"u{dtype.size}"))
        self.rows = self._host if is_token_major else self._host.transpose(2, 0, 1, 3)

    def finish(self) -> mx.array:
        """The filled array, lazy."""
        owner = self._owner if self._owner is not None else mx.array(self._host)
        return owner.view(self._dtype)


class _Part(NamedTuple):
    """Rows [first, first + size) of a file's tensor, to be placed from row `to` of a target on."""

    record: Record
    tensor: str
    first: int
    size: int
    target: _Target
    to: int

    def place(self, block: Block, data: memoryview) -> None:
        """Copy what a block has of these rows."""
        rows = self.target.rows
        held = np.frombuffer(data, rows.dtype).reshape(block.stop - block.first, *rows.shape[1:])
        low, high = max(self.first, block.first), min(self.first + self.size, block.stop)
        to = self.to + low - self.first
        rows[to : to + high - low] = held[low - block.first : high - block.first]


def _parts_of_links(
    links: Sequence[Link], targets: Sequence[_Target], runs: Sequence[Runs]
) -> Iterator[_Part]:
    for link in links:
        for index, target in enumerate(targets):
            for low, high in intersect_runs(link.runs(index), runs[index]):
                first = _rows_before(link.record.runs[index], low)
                to = _rows_before(runs[index], low)
                yield _Part(link.record, f"kv.{index}", first, high - low, target, to)


def _parts_of_mark(mark: Record | None, targets: Sequence[_Target]) -> Iterator[_Part]:
    for index, target in enumerate(targets):
        assert mark is not None
        yield _Part(mark, f"state.{index}", 0, len(target.rows), target, 0)


def _by_file(parts: Sequence[_Part]) -> Iterator[tuple[Record, list[_Part]]]:
    """Parts of the same file, which follow each other."""
    group: list[_Part] = []
    for part in parts:
        if group and group[-1].record is not part.record:
            yield group[-1].record, group
            group = []
        group.append(part)
    if group:
        yield group[-1].record, group


def _wanted(described: Described, parts: Sequence[_Part]) -> Iterator[tuple[_Part, Block]]:
    """The blocks of a file that hold something of each part."""
    tensors = {tensor.name: tensor for tensor in described.header.tensors}
    for part in parts:
        for block in tensors[part.tensor].blocks if part.size else ():
            if block.first < part.first + part.size and part.first < block.stop:
                yield part, block


def _described(disk: Disk, file: FileIO, record: Record, layout: Layout) -> Described:
    """A file's header, which must still say what the index believes."""
    described = read_header(disk, file, record.key, record.size)
    header = described.header
    mine = (record.namespace, record.parent, record.start, bytes(record.tokens))
    found = (header.namespace, header.parent, header.start, header.tokens)
    held = (header.runs, header.has_checkpoint, header.layout)
    if found != mine or held != (record.runs, record.has_checkpoint, layout):
        raise ForeignFile("another file under the same name")
    return described


def _rows_before(runs: Runs, position: int) -> int:
    return count_runs(intersect_runs(runs, ((0, position),)))
