"""Random lives of a cache over an SSD: RAM, index and files agree, and nothing is lost or wrong."""

import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlx_swarm.broker.cache.prompt_cache import PromptCache
from mlx_swarm.broker.cache.ssd import SsdStore
from mlx_swarm.broker.cache.ssd.names import SIDECAR, VERSION
from tests.cache.helpers import put, taken
from tests.cache.rows import FAMILIES, STATEFUL
from tests.cache.ssd.folders import SECONDS, files
from tests.cache.world import Clock

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=20)
CUT_ANYWHERE = sorted({*FAMILIES} - STATEFUL)
SETTINGS = settings(
    max_examples=12,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


class StoreMachine(RuleBasedStateMachine):
    """One family over a store; rough lives have a low cap and files that break or vanish."""

    @initialize(
        family=st.sampled_from(sorted(FAMILIES)),
        ram=st.sampled_from([8_000, 30_000, 1 << 30]),
        is_rough=st.booleans(),
    )
    def start(self, family: str, ram: int, is_rough: bool) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.family, self.ram, self.is_rough = family, ram, is_rough
        self.clock = Clock()
        self.known: list[list[int]] = [[0]]
        self.owed: set[tuple[int, ...]] = set()
        """Sequences that must be served in full, from wherever."""
        self.store = self._opened()
        self.cache = self._fresh()

    @rule(data=st.data(), tokens=TOKENS)
    def put(self, data: Any, tokens: list[int]) -> None:
        sequence = [*self._stem(data), *tokens]
        if put(self.cache, sequence, self.family).stored and self.family in CUT_ANYWHERE:
            self.owed.add(tuple(sequence))
        self.known.append(sequence)

    @rule(data=st.data(), tokens=TOKENS)
    def take(self, data: Any, tokens: list[int]) -> None:
        prompt = [*self._stem(data), *tokens]
        plan = self.cache.plan(prompt)
        # Every byte of what is taken is compared with a computation from nothing.
        length = taken(self.cache, prompt, self.family)
        failed = self.cache.plan(prompt).reason == "restore_failed"
        if not self.is_rough and not failed:
            assert length >= plan.ram_tokens

    @rule(idle=st.sampled_from([0.0, 5.0]), waits=st.booleans())
    def demote(self, idle: float, waits: bool) -> None:
        self.clock.now += 3
        self.cache.demote_idle(idle)
        if waits:
            self.store.flush(SECONDS)
            self.cache.demote_idle(idle)

    @rule()
    def flush(self) -> None:
        left = self.cache.flush(SECONDS)
        if not self.is_rough:
            assert left == (0, 0)
            self._check_files()
            for sequence in self.owed:
                plan = PromptCache(1 << 30, cold=self.store).plan([*sequence, 9])
                assert plan.cold_tokens == len(sequence), (self.family, sequence, plan)

    @rule()
    def forget_ram(self) -> None:
        """Drop all that is in RAM; what is owed must be durable first."""
        self.flush()
        self.cache.clear()

    @rule(keeps_index=st.booleans())
    def restart(self, keeps_index: bool) -> None:
        self.flush()
        self.store.close()
        if not keeps_index:
            (Path(self.folder.name) / VERSION / SIDECAR).unlink(missing_ok=True)
        self.store = self._opened()
        self.cache = self._fresh()

    @precondition(lambda self: self.is_rough)
    @rule(seed=st.integers(0, 1 << 16), vanishes=st.booleans())
    def damage(self, seed: int, vanishes: bool) -> None:
        self.store.flush(SECONDS)
        found = files(Path(self.folder.name))
        if not found:
            return
        pick = random.Random(seed)
        path = pick.choice(found)
        if vanishes:
            path.unlink()
            return
        content = bytearray(path.read_bytes())
        content[pick.randrange(len(content))] ^= 1 << pick.randrange(8)
        path.write_bytes(content)

    @invariant()
    def owes_nothing(self) -> None:
        """Whatever moved or was restarted: what was stored is served to its last token."""
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        if self.is_rough:
            return
        for sequence in self.owed:
            plan = self.cache.plan([*sequence, 9])
            assert plan.usable_tokens == len(sequence), (self.family, sequence, plan)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.folder.cleanup()

    def _check_files(self) -> None:
        self.store.check_integrity()
        found = files(Path(self.folder.name))
        assert len(found) == self.store.statistics().files

    def _opened(self) -> SsdStore:
        return SsdStore(Path(self.folder.name), 20_000 if self.is_rough else 1 << 30)

    def _fresh(self) -> PromptCache:
        return PromptCache(self.ram, cold=self.store, clock=self.clock)

    def _stem(self, data: Any) -> list[int]:
        """Some prefix of something that was put."""
        tokens = data.draw(st.sampled_from(self.known[-8:]))
        return list(tokens[: data.draw(st.integers(0, min(len(tokens), 30)))])


TestStore = pytest.mark.timeout(110)(StoreMachine.TestCase)
TestStore.settings = SETTINGS
