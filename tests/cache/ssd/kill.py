"""Kill a writing process at random instants: `python -m tests.cache.ssd.kill --times 200`.

Each round a child opens the folder of the rounds before, puts sequences and reports those that a
flush called durable. It is killed with SIGKILL at a random instant; then everything ever reported
must be restored bit by bit, and nothing that the store offers may be wrong.
"""

import argparse
import multiprocessing
import random
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from mlx_swarm.broker.cache.prompt_cache import PromptCache
from mlx_swarm.broker.cache.ssd import SsdStore
from mlx_swarm.broker.cache.ssd.disk import Disk
from mlx_swarm.broker.cache.ssd.files import verify_file
from mlx_swarm.broker.cache.ssd.names import UNFINISHED, VERSION, key_of
from tests.cache.helpers import taken
from tests.cache.ssd.folders import CAP, RAM, SECONDS, files, quarantined
from tests.cache.ssd.killed import Sequence, write_for_ever

LONGEST_LIFE = 0.4
"""Seconds after a child was started; opening and importing take a part of them."""


class Killings:
    """Rounds over one folder, and what is owed after them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.owed: set[Sequence] = set()
        self.unfinished = 0
        self._random = random.Random(seed)
        self._processes = multiprocessing.get_context("forkserver")
        # Importing MLX takes longer than a child lives.
        self._processes.set_forkserver_preload([write_for_ever.__module__])

    def round(self) -> None:
        """Start a child, kill it, look at what it left. Raises what is wrong."""
        ours, theirs = self._processes.Pipe(duplex=False)
        seed = self._random.randrange(1 << 30)
        child = self._processes.Process(target=write_for_ever, args=(self.folder, seed, theirs))
        child.start()
        theirs.close()
        # At least one report before the clock runs, in half of the rounds.
        if self._random.random() < 0.5:
            ours.poll(SECONDS)
        child.join(self._random.uniform(0, LONGEST_LIFE))
        assert child.is_alive(), f"the child ended by itself with {child.exitcode}"
        child.kill()
        child.join()
        child.close()
        self.owed.update(_reports(ours))
        ours.close()
        self.check()

    def check(self) -> None:
        """Everything reported is there, everything there is whole."""
        folder = self.folder / VERSION
        self.unfinished += len(list(folder.glob(f"*{UNFINISHED}")))
        for path in files(self.folder):
            key = key_of(path.name)
            assert key is not None
            verify_file(Disk(), path, key)
        with SsdStore(self.folder, CAP) as store:
            store.check_integrity()
            assert not list(folder.glob(f"*{UNFINISHED}"))
            for family, tokens in sorted(self.owed):
                cache = PromptCache(RAM, cold=store)
                prompt = [*tokens, 9]
                assert cache.plan(prompt, family).cold_tokens == len(tokens), (family, tokens)
                assert taken(cache, prompt, family, family) == len(tokens), (family, tokens)
            assert store.statistics().quarantined == 0
        assert not quarantined(self.folder)


def _reports(connection: Connection) -> Iterator[Sequence]:
    """What the child sent in full before it ended."""
    try:
        while True:
            yield from connection.recv()
    except (EOFError, OSError):
        return


def main() -> int:
    """Kill as often as asked; raises at the first thing that is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    owed = unfinished = 0
    for start in range(0, arguments.times, 20):
        with tempfile.TemporaryDirectory() as folder:
            killings = Killings(Path(folder), arguments.seed + start)
            for _ in range(min(20, arguments.times - start)):
                killings.round()
            owed += len(killings.owed)
            unfinished += killings.unfinished
    sys.stdout.write(
        f"{arguments.times} kills: {owed:,} sequences were reported durable and all are restored; "
        f"{unfinished} kills left a file half written, and none was served\n"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
