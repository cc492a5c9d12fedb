"""What a file of the SSD store says about itself: a safetensors header, and where its blocks lie.

The payload is token-major: `kv.<group>` is `[tokens held, planes, heads, dim]`, so the first tokens
of a file are its first bytes; `state.<group>` is a checkpoint, valid at the file's last token. Both
are cut into blocks with a checksum each. The header has a checksum of its own.
"""

import base64
from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import msgspec
import xxhash
from msgspec import Struct

from ...errors import CorruptFile, ForeignFile
from ..dtypes import item_bytes
from ..layout import Layout
from ..runs import Runs, count_runs

FORMAT = 1
BLOCK_BYTES = 512 << 10
"""Blocks are at most so large, and at least one token: what is read should still be in the
processor's cache when it is checked and copied.
"""

MAX_HEADER_BYTES = 256 << 20
LENGTH_BYTES = 8
ALIGNMENT = 64
CHECKSUM_DIGITS = 16

_DTYPES = {
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}


class Block(NamedTuple):
    """Rows [first, stop) of a tensor: `size` bytes at `offset` of the payload; its `number` is that
    of its checksum.
    """

    number: int
    first: int
    stop: int
    offset: int
    size: int


class Tensor(NamedTuple):
    """One tensor of the payload, and its blocks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    blocks: tuple[Block, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of it in the payload."""
        return sum(block.size for block in self.blocks)


class Header(Struct, frozen=True, kw_only=True, dict=True, omit_defaults=True):
    """Tokens [start, stop) of a sequence of a namespace (a digest), which follow those of `parent`.

    `key` is the file's name, `parent` that of the file it hangs on, or the namespace at the root.
    `runs` are the positions held for each of `layout.groups`. With no tokens it is a checkpoint
    alone. `model` is a name for people; files of older versions have none.
    """

    key: str
    parent: str
    namespace: str
    start: int
    stop: int
    tokens: bytes
    layout: Layout
    runs: tuple[Runs, ...]
    has_checkpoint: bool
    model: str = ""

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The payload, in order."""
        result: list[Tensor] = []
        for index, (group, runs) in enumerate(zip(self.layout.groups, self.runs, strict=True)):
            plane = group.plane
            tokens = count_runs(runs)
            shape = (tokens, len(group.members), plane.heads, plane.dim)
            _append(result, f"kv.{index}", plane.dtype, shape)
        for index, state in enumerate(self.layout.state_groups if self.has_checkpoint else ()):
            slots = (len(state.members), *state.slot.shape)
            _append(result, f"state.{index}", state.slot.dtype, slots)
        return tuple(result)

    @cached_property
    def block_count(self) -> int:
        """Blocks of all tensors."""
        return sum(len(tensor.blocks) for tensor in self.tensors)

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes after the header."""
        return sum(tensor.nbytes for tensor in self.tensors)


class Described(NamedTuple):
    """A header read from a file, the checksum of each block, and where the payload begins."""

    header: Header
    checksums: tuple[int, ...]
    payload: int

    @property
    def file_bytes(self) -> int:
        """What the file's size must be."""
        return self.payload + self.header.payload_bytes


def encode(header: Header, checksums: Sequence[int]) -> bytes:
    """The first bytes of a file, up to the payload; their number does not depend on checksums."""
    about = msgspec.json.encode(header).decode()
    digits = "".join(f"{each:0{CHECKSUM_DIGITS}x}" for each in checksums)
    table: dict[str, Any] = {
        "__metadata__": {
            "mlx-swarm.format": str(FORMAT),
            "mlx-swarm.header": about,
            "mlx-swarm.checksums": digits,
            "mlx-swarm.seal": _seal(about, digits),
        }
    }
    for tensor in header.tensors:
        bounds = [tensor.offset, tensor.offset + tensor.nbytes]
        table[tensor.name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": bounds,
        }
    text = msgspec.json.encode(table)
    size = -(-(LENGTH_BYTES + len(text)) // ALIGNMENT) * ALIGNMENT - LENGTH_BYTES
    return size.to_bytes(LENGTH_BYTES, "little") + text.ljust(size)


def file_bytes(header: Header) -> int:
    """How large the file will be."""
    return len(encode(header, [0] * header.block_count)) + header.payload_bytes


def header_bytes(first: bytes) -> int:
    """How many bytes the header takes whose first `LENGTH_BYTES` are given."""
    size = int.from_bytes(first[:LENGTH_BYTES], "little")
    if len(first) < LENGTH_BYTES or not 0 < size <= MAX_HEADER_BYTES:
        raise CorruptFile(f"a header of {size:,} bytes")
    return LENGTH_BYTES + size


def decode(data: bytes) -> Described:
    """A header from all its bytes.

    Raises `ForeignFile` if another or newer version wrote it, `CorruptFile` if it is broken.
    """
    try:
        metadata = msgspec.json.decode(data[LENGTH_BYTES:], type=_Table).metadata
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptFile(f"the header cannot be read: {error}") from None
    version = metadata.get("mlx-swarm.format", "")
    if not version.isdecimal():
        raise ForeignFile("not a file of this store")
    if int(version) != FORMAT:
        raise ForeignFile(f"format {version}; this version knows {FORMAT}")
    about, digits = (metadata.get(f"mlx-swarm.{name}", "") for name in ("header", "checksums"))
    if metadata.get("mlx-swarm.seal") != _seal(about, digits):
        raise CorruptFile("the header's checksum is wrong")
    try:
        header = msgspec.json.decode(about, type=Header)
    except msgspec.ValidationError as error:
        raise ForeignFile(f"written by another version: {error}") from None
    numbers = [
        int(digits[at : at + CHECKSUM_DIGITS], 16) for at in range(0, len(digits), CHECKSUM_DIGITS)
    ]
    if len(numbers) != header.block_count:
        raise CorruptFile(f"{len(numbers)} checksums for {header.block_count} blocks")
    return Described(header, tuple(numbers), len(data))


class _Table(Struct):
    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


def _seal(about: str, digits: str) -> str:
    sealed = base64.b16encode(xxhash.xxh3_128_digest(f"{FORMAT}|{about}|{digits}".encode()))
    return sealed.decode().lower()


def _append(tensors: list[Tensor], name: str, dtype: str, shape: tuple[int, ...]) -> None:
    """Lay a tensor out behind those before it, unless it is empty."""
    row = item_bytes(dtype) * prod(shape[1:])
    offset = tensors[-1].offset + tensors[-1].nbytes if tensors else 0
    number = tensors[-1].blocks[-1].number + 1 if tensors else 0
    step = max(1, BLOCK_BYTES // row) if row else 1
    blocks = tuple(
        Block(number + at, first, stop, offset + first * row, (stop - first) * row)
        for at, first in enumerate(range(0, shape[0] if row else 0, step))
        for stop in [min(first + step, shape[0])]
    )
    if blocks:
        tensors.append(Tensor(name, dtype, shape, offset, blocks))
