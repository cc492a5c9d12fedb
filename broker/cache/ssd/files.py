"""One file of the store: written whole or not at all, read block by block, every byte checked."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from ...errors import CorruptFile
from .disk import Disk
from .header import Block, Described, Header, decode, encode, header_bytes
from .names import UNFINISHED, path_of

if TYPE_CHECKING:
    from .pieces import Rows

FIRST_READ_BYTES = 16 << 10


def write_file(disk: Disk, folder: Path, header: Header, sources: "Sequence[Rows]") -> None:
    """Write a file under its name; it is durable once its folder is synced too.

    `sources` are the rows of `header.tensors`. Whatever fails leaves nothing behind.
    """
    with replacing(disk, path_of(folder, header.key)) as file:
        _write(disk, file, header, sources)
        disk.sync(file)


@contextmanager
def replacing(disk: Disk, target: Path) -> Iterator[FileIO]:
    """A file to be written that gets its name at the end, or is gone if something fails."""
    unfinished = target.with_name(f"{target.name}{UNFINISHED}")
    try:
        with closing(disk.create(unfinished)) as file:
            yield file
        disk.replace(unfinished, target)
    except BaseException:
        with suppress(OSError):
            disk.remove(unfinished)
        raise


def read_header(disk: Disk, file: FileIO, key: str, size: int) -> Described:
    """The header of a file of that name and size.

    Raises `ForeignFile` or `CorruptFile` if it is not one of ours or not what was written.
    """
    buffer = memoryview(bytearray(min(size, FIRST_READ_BYTES)))
    first = bytes(buffer[: disk.read_into(file, 0, buffer)])
    length = header_bytes(first)
    if length > size:
        raise CorruptFile(f"{size:,} bytes; the header alone has {length:,}")
    if length > len(first):
        buffer = memoryview(bytearray(length))
        first = bytes(buffer[: disk.read_into(file, 0, buffer)])
    described = decode(first[:length])
    if described.header.key != key:
        raise CorruptFile(f"it holds {described.header.key}")
    if described.file_bytes != size:
        raise CorruptFile(f"{size:,} bytes; {described.file_bytes:,} were written")
    return described


def read_block(
    disk: Disk, file: FileIO, described: Described, block: Block, buffer: memoryview
) -> memoryview:
    """The bytes of a block, unchecked, in the first part of `buffer`.

    Raises `CorruptFile` if the file ends before them.
    """
    part = buffer[: block.size]
    count = disk.read_into(file, described.payload + block.offset, part)
    if count != block.size:
        raise CorruptFile(f"block {block.number} ends after {count:,} of {block.size:,} bytes")
    return part


def check_block(described: Described, block: Block, data: memoryview) -> None:
    """Raise `CorruptFile` if the bytes of a block are not what was written."""
    if xxhash.xxh3_64_intdigest(data) != described.checksums[block.number]:
        raise CorruptFile(f"block {block.number} has a wrong checksum")


def verify_file(disk: Disk, path: Path, key: str) -> Described:
    """Read all of a file; raises what is wrong with it."""
    size = disk.facts(path).size
    with closing(disk.open(path)) as file:
        described = read_header(disk, file, key, size)
        blocks = [block for tensor in described.header.tensors for block in tensor.blocks]
        buffer = memoryview(bytearray(max((block.size for block in blocks), default=0)))
        for block in blocks:
            check_block(described, block, read_block(disk, file, described, block, buffer))
    return described


def _write(disk: Disk, file: FileIO, header: Header, sources: "Sequence[Rows]") -> None:
    disk.write(file, memoryview(encode(header, [0] * header.block_count)))
    checksums = []
    for data in _blocks(header, sources):
        checksums.append(xxhash.xxh3_64_intdigest(data))
        disk.write(file, data)
    file.seek(0)
    disk.write(file, memoryview(encode(header, checksums)))


def _blocks(header: Header, sources: "Sequence[Rows]") -> Iterator[memoryview]:
    """Every block in turn, in the same memory: fresh pages would cost more than the copy."""
    filled = [rows for rows in sources if rows.size and rows.raw.size]
    sizes = (block.size for tensor in header.tensors for block in tensor.blocks)
    memory = memoryview(bytearray(max(sizes, default=0)))
    for tensor, rows in zip(header.tensors, filled, strict=True):
        array = rows.array()
        for block in tensor.blocks:
            data = memory[: block.size]
            held = array[block.first : block.stop]
            np.copyto(np.frombuffer(data, held.dtype).reshape(held.shape), held)
            yield data
