"""What several test modules of the engine need."""

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mlx_swarm.broker.cache.restores import Restoration
from mlx_swarm.broker.cache.ssd.disk import Disk


class HeldWrites(NamedTuple):
    """Files of the cold tier are made once `go` is set; `begun` says that one was to be made."""

    begun: threading.Event
    go: threading.Event


@pytest.fixture
def held_writes(monkeypatch: pytest.MonkeyPatch) -> HeldWrites:
    """A disk that hangs when a file is made, for longer than any test may take."""
    held, create = HeldWrites(threading.Event(), threading.Event()), Disk.create

    def wait(self: Disk, path: Path) -> Any:
        held.begun.set()
        held.go.wait(100)
        return create(self, path)

    monkeypatch.setattr(Disk, "create", wait)
    return held


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Readings of the cold tier wait until the event is set."""
    hold, run = threading.Event(), Restoration.run

    def wait(self: Restoration) -> None:
        hold.wait(20)
        run(self)

    monkeypatch.setattr(Restoration, "run", wait)
    return hold


@pytest.fixture(autouse=True, scope="module")
def _collected() -> Iterator[None]:
    """A generator of mlx-lm that a test dropped must not be closed in another thread: MLX's streams
    are those of one.
    """
    yield
    gc.collect()
