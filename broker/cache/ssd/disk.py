"""Every file operation of the SSD store; tests put failing ones in their place. No MLX."""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import closing
from io import FileIO
from pathlib import Path
from typing import NamedTuple

FILE_MODE = 0o600
FOLDER_MODE = 0o700


class Facts(NamedTuple):
    """What the folder says of a file. Recency is its time of access, which the store sets."""

    name: str
    size: int
    modified_ns: int
    used_ns: int


class Disk:
    """The file system. Whatever fails raises `OSError`."""

    def make_folder(self, folder: Path) -> None:
        """A private folder, and what is missing above it."""
        folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)

    def is_at(self, descriptor: int, path: Path) -> bool:
        """Whether an open file is the one that is found there, not one made later."""
        return os.path.samestat(os.fstat(descriptor), path.stat())

    def entries(self, folder: Path) -> Iterator[Facts]:
        """The plain files in a folder; one that vanishes meanwhile is left out."""
        with os.scandir(folder) as found:
            for entry in found:
                try:
                    facts = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(facts.st_mode):
                    yield Facts(entry.name, facts.st_size, facts.st_mtime_ns, facts.st_atime_ns)

    def facts(self, path: Path) -> Facts:
        """What is known of one file."""
        facts = path.stat()
        return Facts(path.name, facts.st_size, facts.st_mtime_ns, facts.st_atime_ns)

    def open(self, path: Path) -> FileIO:
        """A file to read; reading is no use of it, as far as that can be had."""
        flags = os.O_RDONLY | os.O_CLOEXEC
        try:
            return FileIO(os.open(path, flags | getattr(os, "O_NOATIME", 0)), "rb")
        except PermissionError:
            return FileIO(os.open(path, flags), "rb")

    def expect(self, path: Path) -> None:
        """Have the system begin to read a file, where it can be asked to."""
        if hasattr(os, "posix_fadvise"):
            with closing(self.open(path)) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def read_into(self, file: FileIO, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from a place in the file; returns how much of it, less at the end only."""
        file.seek(offset)
        filled = 0
        while filled < len(buffer):
            count = file.readinto(buffer[filled:])
            if not count:
                break
            filled += count
        return filled

    def create(self, path: Path) -> FileIO:
        """A new private file, to be written, instead of what is there, if anything is."""
        self.remove(path)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        return FileIO(os.open(path, flags, FILE_MODE), "wb")

    def write(self, file: FileIO, data: memoryview) -> None:
        """Write all of it where the file stands."""
        while data:
            data = data[file.write(data) :]

    def sync(self, file: FileIO) -> None:
        """Return once what was written would survive a crash."""
        full = getattr(fcntl, "F_FULLFSYNC", None)
        if full is None:
            os.fsync(file.fileno())
        else:
            fcntl.fcntl(file.fileno(), full)

    def sync_folder(self, folder: Path) -> None:
        """Return once renames and removals in a folder would survive a crash."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def replace(self, source: Path, target: Path) -> None:
        """Give a file its name; who looks sees the old file or the new one."""
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there."""
        path.unlink(missing_ok=True)

    def touch(self, path: Path, used_ns: int, modified_ns: int) -> None:
        """Note when a file was used last."""
        os.utime(path, ns=(used_ns, modified_ns))

    def open_lock(self, path: Path) -> int:
        """The descriptor of a file that exists to be locked."""
        return os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, FILE_MODE)
