"""Reading GGUF files: metadata, and tensors as rows of raw blocks. No MLX.

Every length is checked against the file before it is used, so a broken file is an error, never a
crash. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn, Self

import numpy as np
import numpy.typing as npt

from ..errors import ModelUnreadable

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
MAX_DIMENSIONS = 4
SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}


class BlockFormat(NamedTuple):
    """How a tensor type packs its values: `size` bytes for every `values` values of a row."""

    name: str
    values: int
    size: int


FORMATS = {
    0: BlockFormat("F32", 1, 4),
    1: BlockFormat("F16", 1, 2),
    2: BlockFormat("Q4_0", 32, 18),
    3: BlockFormat("Q4_1", 32, 20),
    8: BlockFormat("Q8_0", 32, 34),
    30: BlockFormat("BF16", 1, 2),
}
UNSUPPORTED_NAMES = {
    **{6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K"},
    **{15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL"},
    **{21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64"},
    **{28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"},
}


class TensorInfo(NamedTuple):
    """Where a tensor lies. `shape` is row-major (the file's dimensions reversed); `offset` is
    absolute."""

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    offset: int

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.format.values * self.format.size

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


class GGUFFile:
    """An open GGUF file: `metadata`, `tensors`, and `read` for a tensor's raw rows. A context
    manager.

    Raises `ModelUnreadable` for a file that is broken, truncated, or has a tensor type not in
    `FORMATS`.
    """

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise ModelUnreadable(f"cannot open {path}: {error.strerror}") from error
        try:
            self._size = os.fstat(self._file.fileno()).st_size
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    def read(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        """The tensor's blocks as they are in the file: uint8 [rows, bytes of a row]."""
        self._file.seek(info.offset)
        return np.frombuffer(self._take(info.nbytes), np.uint8).reshape(-1, info.row_bytes)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read_header(self) -> None:
        if self._size < len(MAGIC) or self._take(len(MAGIC)) != MAGIC:
            raise ModelUnreadable(f"{self.path} is not a GGUF file")
        version = self._scalar(4)
        if version not in VERSIONS:
            raise ModelUnreadable(f"{self.path} is GGUF version {version}; 2 and 3 are supported")
        tensor_count, entry_count = self._scalar(10), self._scalar(10)
        self.metadata = {}
        for _ in range(entry_count):
            key = self._string()
            self.metadata[key] = self._value(self._scalar(4))
        described = [self._tensor_info() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            self._fail(f"its alignment is {alignment}")
        start = math.ceil(self._file.tell() / alignment) * alignment
        self.tensors = {info.name: info._replace(offset=start + info.offset) for info in described}
        for info in self.tensors.values():
            self._check_extent(info)
        if len(self.tensors) != tensor_count:
            self._fail("a tensor name occurs twice")

    def _tensor_info(self) -> TensorInfo:
        name = self._string()
        dimensions = self._scalar(4)
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            self._fail(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._scalar(10) for _ in range(dimensions))[::-1]
        kind, offset = self._scalar(4), self._scalar(10)
        if kind not in FORMATS:
            known = ", ".join(entry.name for entry in FORMATS.values())
            found = UNSUPPORTED_NAMES.get(kind, f"of type {kind}")
            raise ModelUnreadable(f"{self.path}: tensor {name!r} is {found}; supported are {known}")
        if shape[-1] % FORMATS[kind].values or 0 in shape:
            self._fail(f"tensor {name!r} of shape {shape} cannot be {FORMATS[kind].name}")
        return TensorInfo(name, shape, FORMATS[kind], offset)

    def _check_extent(self, info: TensorInfo) -> None:
        if info.offset + info.nbytes > self._size:
            self._fail(
                f"tensor {info.name!r} ends at byte {info.offset + info.nbytes:,}, "
                f"the file at {self._size:,}"
            )

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            element, count = self._scalar(4), self._scalar(10)
            if element == STRING:
                return [self._string() for _ in range(count)]
            return self._numbers(element, count)
        return self._scalar(kind)

    def _numbers(self, kind: int, count: int) -> list[Any]:
        if kind not in SCALARS:
            self._fail(f"it holds an array of type {kind}")
        layout = SCALARS[kind]
        return [value for (value,) in layout.iter_unpack(self._take(layout.size * count))]

    def _string(self) -> str:
        # Tokens of byte-level vocabularies are text, but old files hold broken ones in general.*
        # entries.
        return self._take(self._scalar(10)).decode("utf-8", errors="replace")

    def _scalar(self, kind: int) -> Any:
        if kind not in SCALARS:
            self._fail(f"it holds a value of type {kind}")
        return SCALARS[kind].unpack(self._take(SCALARS[kind].size))[0]

    def _take(self, count: int) -> bytes:
        if count > self._size - self._file.tell():
            self._fail("it ends in the middle")
        return self._file.read(count)

    def _fail(self, what: str) -> NoReturn:
        raise ModelUnreadable(f"{self.path} is broken or truncated: {what}")
