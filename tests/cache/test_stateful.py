"""Random lives of a prompt cache, compared with the oracle after every step."""

from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.cache.fake_cold import FakeColdStore
from tests.cache.rows import FAMILIES
from tests.cache.world import World, constant_hashes

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=20)
KNOWN = st.sampled_from([(), (), (True,), (True,), (True, True, True, False)])
ALTERNATIVES = st.sampled_from([None, None, None, 0, 0, 3])
SETTINGS = settings(
    max_examples=12,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


class CacheMachine(RuleBasedStateMachine):
    """Takes, puts, releases, pins, clears over one namespace for each family."""

    world: World
    hashes: ExitStack
    puts: list[tuple[str, list[int]]]

    @initialize(
        families=st.lists(st.sampled_from(sorted(FAMILIES)), min_size=1, max_size=3, unique=True),
        max_bytes=st.sampled_from([4_000, 12_000, 1 << 30]),
        has_cold=st.booleans(),
        is_slow=st.booleans(),
        is_colliding=st.booleans(),
    )
    def start(
        self,
        families: list[str],
        max_bytes: int,
        has_cold: bool,
        is_slow: bool,
        is_colliding: bool,
    ) -> None:
        self.hashes = ExitStack()
        if is_colliding:
            self.hashes.enter_context(constant_hashes())
        cold = FakeColdStore(is_slow=is_slow) if has_cold else None
        self.world = World(families, max_bytes, cold)
        self.puts = [(families[0], [0])]

    @rule(data=st.data(), tokens=TOKENS, chunk=st.integers(1, 9), known=KNOWN)
    def put(self, data: Any, tokens: list[int], chunk: int, known: tuple[bool, ...]) -> None:
        family, stem = self._stem(data)
        self.world.put(family, [*stem, *tokens], chunk, known)
        self.puts.append((family, [*stem, *tokens]))

    @rule(data=st.data(), tokens=TOKENS, alternatives=ALTERNATIVES)
    def take(self, data: Any, tokens: list[int], alternatives: int | None) -> None:
        family, stem = self._stem(data)
        self.world.take(family, [*stem, *tokens], alternatives)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), tokens=TOKENS)
    def step(self, data: Any, tokens: list[int]) -> None:
        self.world.step(self._running(data), tokens[:6])

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), count=st.integers(1, 8))
    def trim(self, data: Any, count: int) -> None:
        self.world.trim(self._running(data), count)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), known=KNOWN)
    def put_running(self, data: Any, known: tuple[bool, ...]) -> None:
        self.world.put_running(self._running(data), known)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        self.world.release(self._running(data))

    @rule(data=st.data(), ttl=st.sampled_from([1.0, 100.0]))
    def pin(self, data: Any, ttl: float) -> None:
        self.world.pin(*self._stem(data), ttl)

    @rule(seconds=st.sampled_from([0.5, 10.0]), idle=st.sampled_from([0.0, 5.0]))
    def demote(self, seconds: float, idle: float) -> None:
        self.world.clock.now += seconds
        self.world.demote(idle)

    @rule(data=st.data(), everything=st.booleans())
    def clear(self, data: Any, everything: bool) -> None:
        self.world.clear(None if everything else self._stem(data)[0])

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()
        if hasattr(self, "hashes"):
            self.hashes.close()

    def _stem(self, data: Any) -> tuple[str, list[int]]:
        """A namespace, and some prefix of something that was put there."""
        family, tokens = data.draw(st.sampled_from(self.puts[-8:]))
        family = data.draw(st.sampled_from([family, *self.world.families]))
        return family, tokens[: data.draw(st.integers(0, min(len(tokens), 30)))]

    def _running(self, data: Any) -> int:
        return int(data.draw(st.integers(0, len(self.world.running) - 1)))


TestCache = pytest.mark.timeout(110)(CacheMachine.TestCase)
TestCache.settings = SETTINGS
