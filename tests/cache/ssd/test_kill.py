"""Kill -9 loses at most what was not acknowledged, and never serves wrong KV."""

from pathlib import Path

from tests.cache.ssd.kill import Killings


def test_what_was_acknowledged_survives_kill_nine(tmp_path: Path) -> None:
    killings = Killings(tmp_path, seed=1)
    for _ in range(10):
        killings.round()
    assert killings.owed
