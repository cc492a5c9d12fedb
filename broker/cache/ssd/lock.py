"""Who may write to a folder: the process that holds its lock, until it ends, however it ends."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from .disk import Disk
from .names import LOCK


class FolderLock:
    """A lock on a folder; `take` again after the folder was replaced."""

    def __init__(self, disk: Disk, folder: Path) -> None:
        self._disk = disk
        self._path = folder / LOCK
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        """Whether this process has the lock of the folder that is there now."""
        if self._descriptor is None:
            return False
        with suppress(OSError):
            return self._disk.is_at(self._descriptor, self._path)
        return False

    def take(self) -> bool:
        """Whether this process has the lock now. Raises `OSError` where no lock can be had."""
        self.release()
        descriptor = self._disk.open_lock(self._path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Let another process have it."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)
