"""64 agents at once on a cache that is full: all are served, and nobody waits for nothing."""

import pytest

from mlx_swarm.broker import Request
from mlx_swarm.broker.engine.fairness import AGING_SECONDS
from mlx_swarm.broker.engine.memory import weight_bytes
from tests.engine.driver import Driver, assert_greedy
from tests.engine.test_shared import model_of
from tests.tiny_broker import prompt

TOKEN = 3 * 2 * 2 * 16 * 4
TURN_SECONDS = 0.01


class Clock:
    """Goes on with every turn; `slept` is what passed while the engine had nothing to do."""

    def __init__(self) -> None:
        self.now = self.slept = 0.0

    def __call__(self) -> float:
        self.now += TURN_SECONDS / 10
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + TURN_SECONDS
        self.slept += seconds


@pytest.mark.parametrize(("ram", "memory"), [(0, 300), (100, 300), (50, 100_000)])
def test_64_requests_on_a_full_cache_never_stall(ram: int, memory: int) -> None:
    """`ram` and `memory` are in tokens; a conversation has up to 80."""
    model, clock = model_of("llama"), Clock()
    driver = Driver(
        model,
        ram=ram * TOKEN,
        memory=weight_bytes(model) + memory * TOKEN,
        max_rows=64,
        clock=clock,
        sleep=clock.sleep,
    )
    driver.submit(Request(tokens=[*range(10, 10 + 70)], max_tokens=1))
    driver.run()
    asked = [
        Request(
            tokens=prompt(agent, own=1 + agent % 8)[agent % 3 :],
            max_tokens=4 + agent % 9,
            agent=f"agent-{agent}" if agent % 4 else "",
            swarm=f"swarm-{agent % 5}",
        )
        for agent in range(64)
    ]
    for request in asked:
        driver.submit(request)
    driver.run()
    for request, box in zip(asked, driver.boxes[1:], strict=True):
        assert box.end is not None, box.error
        assert_greedy(model, request.tokens, box.tokens)
    assert clock.slept <= AGING_SECONDS, "of agents that came once"
    driver.check_idle()
