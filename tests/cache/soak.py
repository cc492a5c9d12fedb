"""A long random life of the prompt cache: `python -m tests.cache.soak --steps 200000`.

Each world lives for a few hundred steps with another seed, budget, set of families and cold tier;
every step is compared with the oracle. Prints its progress, and the seed of the world that failed.
"""

import argparse
import logging
import math
import random
import sys
import time
from collections import Counter
from contextlib import nullcontext

from tests.cache.fake_cold import FakeColdStore, OwnedSink, SyncSink
from tests.cache.rows import FAMILIES
from tests.cache.world import World, constant_hashes

STEPS_A_WORLD = 250
MAX_TOKENS = 48
COLLIDING = 8
"""In one world of so many every hash is the same."""

OPERATIONS = {
    "put": 5,
    "take": 8,
    "step": 3,
    "trim": 1,
    "put_running": 4,
    "release": 6,
    "pin": 1,
    "steer": 1,
    "demote": 1,
    "clear": 0.3,
    "break_cold": 0.5,
    "use_sink": 1,
    "tick": 2,
}


class Life:
    """One world and the random choices that drive it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random
        families = pick.sample(sorted(FAMILIES), pick.randint(1, 3))
        budget = pick.choice([6_000, 12_000, 30_000, 80_000, 1 << 30])
        cold = FakeColdStore(is_slow=pick.random() < 0.5) if pick.random() < 0.4 else None
        sink = pick.choice([None, None, OwnedSink(), SyncSink()]) if cold is None else None
        self.world = World(families, budget, cold, sink)
        self.known: list[tuple[str, list[int]]] = [(families[0], [0])]
        self.done: Counter[str] = Counter()

    def live(self) -> None:
        """One random operation."""
        names = list(OPERATIONS)
        name = self.random.choices(names, [OPERATIONS[each] for each in names])[0]
        if name in ("step", "trim", "put_running", "release") and not self.world.running:
            name = "take"
        if name == "take" and len(self.world.running) > 6:
            name = "release"
        self.done[name] += 1
        getattr(self, name)()

    def finish(self) -> Counter[str]:
        """End the world; what it did, and what came of it."""
        total = self.world.cache.statistics().total
        for each in ("hits", "misses", "evictions", "demotions", "restores", "duplicates"):
            self.done[each] += getattr(total, each)
        self.done["compared_tokens"] += total.hit_tokens
        self.world.finish()
        return self.done

    def put(self) -> None:
        family, tokens = self._prompt()
        self.world.put(family, tokens, self.random.randint(1, 9), self._known_logprobs())
        self._know(family, tokens)

    def take(self) -> None:
        self.world.take(*self._prompt(), self.random.choice([None, None, None, 0, 0, 3]))

    def step(self) -> None:
        self.world.step(self._running(), self._tokens(6))

    def trim(self) -> None:
        self.world.trim(self._running(), self.random.randint(1, 8))

    def put_running(self) -> None:
        index = self._running()
        running = self.world.running[index]
        self.world.put_running(index, self._known_logprobs())
        self._know(running.namespace, list(running.tokens))

    def release(self) -> None:
        self.world.release(self._running())

    def pin(self) -> None:
        self.world.pin(*self._prompt(), self.random.choice([1.0, 50.0]))

    def steer(self) -> None:
        family, tokens = self._prompt()
        self.world.cache.prioritise(tokens, self.random.randint(-1, 2), family)
        eta = self.random.choice([-1.0, 3.0, 30.0, math.inf])
        target = self.world.running[self._running()].lease if self.world.running else tokens
        self.world.cache.next_use(target, eta, family)
        self.world.check()

    def demote(self) -> None:
        self.world.demote(self.random.choice([0.0, 20.0]))

    def clear(self) -> None:
        everything = self.random.random() < 0.3
        self.world.clear(None if everything else self.random.choice(self.world.families))

    def break_cold(self) -> None:
        cold = self.world.cold
        if cold is not None:
            cold.is_full = self.random.random() < 0.2
            cold.is_refusing = self.random.random() < 0.1
            cold.unreadable = {n for n in cold.entries if self.random.random() < 0.1}
            cold.finish(self.random.randint(0, 3))

    def use_sink(self) -> None:
        sink = self.world.sink
        if sink is not None:
            sink.is_broken = self.random.random() < 0.2
            self.world.empty_sink()

    def tick(self) -> None:
        self.world.clock.now += self.random.expovariate(0.2)

    def _prompt(self) -> tuple[str, list[int]]:
        family, stem = self.random.choice(self.known[-20:])
        if self.random.random() < 0.2:
            family = self.random.choice(self.world.families)
        cut = self.random.choice([len(stem), self.random.randint(0, len(stem))])
        tokens = [*stem[:cut], *self._tokens(12)]
        return family, tokens[:MAX_TOKENS]

    def _tokens(self, most: int) -> list[int]:
        return [self.random.randint(0, 2) for _ in range(self.random.randint(1, most))]

    def _known_logprobs(self) -> tuple[bool, ...]:
        return self.random.choice([(), (), (True,), (True, True, True, False)])

    def _running(self) -> int:
        return self.random.randrange(len(self.world.running))

    def _know(self, family: str, tokens: list[int]) -> None:
        self.known.append((family, tokens))


def run(seed: int, steps: int) -> Counter[str]:
    """Live one life; raises what it fails with."""
    with constant_hashes() if seed % COLLIDING == 0 else nullcontext():
        life = Life(seed)
        for _ in range(steps):
            life.live()
        return life.finish()


def main() -> int:
    """Run lives until the steps are done; 1 after the first failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    started, steps, seed = time.monotonic(), 0, arguments.seed
    done: Counter[str] = Counter()
    while steps < arguments.steps:
        count = min(STEPS_A_WORLD, arguments.steps - steps)
        try:
            done += run(seed, count)
        except BaseException:
            sys.stdout.write(f"seed {seed} failed\n")
            raise
        steps, seed = steps + count, seed + 1
        if steps % (STEPS_A_WORLD * 40) == 0:
            sys.stdout.write(f"{steps:,} steps, {time.monotonic() - started:.0f} s\n")
            sys.stdout.flush()
    shares = ", ".join(f"{name} {count:,}" for name, count in sorted(done.items()))
    sys.stdout.write(f"{steps:,} random steps passed in {seed - arguments.seed} worlds: {shares}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
