"""The index as one file, so that opening a folder need not read every header. No MLX.

It is believed of a file only while the file's size and time of change are the same, and never
instead of the header when something is restored.
"""

import logging
from pathlib import Path

import msgspec
import xxhash
from msgspec import Struct

from ..layout import Layout
from .disk import Disk
from .files import replacing
from .header import FORMAT
from .names import SIDECAR
from .record import Record

DIGEST_BYTES = 16

_log = logging.getLogger(__name__)


class Sidecar(Struct, frozen=True, array_like=True):
    """What is known of each file, and the layouts that records number."""

    format: int
    layouts: tuple[Layout, ...]
    records: list[Record]


def save(disk: Disk, folder: Path, layouts: tuple[Layout, ...], records: list[Record]) -> None:
    """Write down what is known of a folder. Raises `OSError`."""
    data = msgspec.msgpack.encode(Sidecar(FORMAT, layouts, records))
    with replacing(disk, folder / SIDECAR) as file:
        disk.write(file, memoryview(xxhash.xxh3_128_digest(data)))
        disk.write(file, memoryview(data))


def load(folder: Path) -> Sidecar:
    """What was written down, or nothing if there is nothing to be believed."""
    if not (folder / SIDECAR).is_file():
        return Sidecar(FORMAT, (), [])
    try:
        # The tokens of records stay views of this.
        data = memoryview((folder / SIDECAR).read_bytes())
        if data[:DIGEST_BYTES] != xxhash.xxh3_128_digest(data[DIGEST_BYTES:]):
            raise ValueError("its checksum is wrong")
        found = msgspec.msgpack.decode(data[DIGEST_BYTES:], type=Sidecar)
    except (OSError, ValueError) as error:
        _log.info("the index of %s is not used: %s", folder, error)
        return Sidecar(FORMAT, (), [])
    return found if found.format == FORMAT else Sidecar(FORMAT, (), [])
