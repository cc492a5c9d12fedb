"""What several test modules of the engine need."""

import threading

import pytest

from mlx_swarm.broker.cache.restores import Restoration


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Readings of the cold tier wait until the event is set."""
    hold, run = threading.Event(), Restoration.run

    def wait(self: Restoration) -> None:
        hold.wait(20)
        run(self)

    monkeypatch.setattr(Restoration, "run", wait)
    return hold
