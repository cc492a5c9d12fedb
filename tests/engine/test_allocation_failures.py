"""Memory that runs out wherever arrays are made: who is hit ends alone, the engine lives on."""

import itertools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from mlx_swarm.broker import Grammar, Request, Sampling
from mlx_swarm.broker.errors import EngineFailed
from tests.engine.driver import Driver, assert_greedy
from tests.engine.test_shared import model_of
from tests.tiny_broker import SHARED, prompt

ALLOCATION = "[malloc_or_wait] Unable to allocate 4096 bytes on purpose."
REPLICATED = "synthetic:deepseek_v3?layers=1&hidden=64&context=512&seed=3"


class Memory:
    """Refuses one of the allocations that follow, as MLX does: from whatever evaluates an array."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left = 0
        for name in ("eval", "async_eval"):
            patch.setattr(mx, name, self._counting(getattr(mx, name)))

    def _counting(self, evaluate: Callable[..., None]) -> Callable[..., None]:
        def counted(*arrays: Any) -> None:
            self.left -= 1
            if self.left == 0:
                raise RuntimeError(ALLOCATION)
            evaluate(*arrays)

        return counted


def asked() -> list[Request]:
    return [
        Request(tokens=prompt(0), max_tokens=6, boundaries=(len(SHARED),)),
        Request(tokens=prompt(1), max_tokens=5, logprobs=True, top_logprobs=2),
        Request(tokens=prompt(0, own=20), max_tokens=4, prompt_logprobs=True),
        Request(tokens=prompt(2), max_tokens=4, grammar=Grammar(regex="[ab]{9}")),
        Request(tokens=prompt(3), max_tokens=4, sampling=Sampling(presence_penalty=1.0)),
        Request(tokens=prompt(4), max_tokens=4, deterministic=True),
        Request(tokens=prompt(5), max_tokens=4, cache=False),
    ]


@pytest.mark.parametrize(("kind", "first"), [("llama", 1), ("lfm2", 6), (REPLICATED, 11)])
def test_an_allocation_that_fails_anywhere_ends_who_needed_it_and_leaves_nothing(
    kind: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, hit = model_of(kind), 0
    memory = Memory(monkeypatch)
    requests = asked()
    plain = (0, 1, 2, 5, 6)
    for at in itertools.count(first, 15):
        memory.left = 0
        driver = Driver(model, chunk=16, max_rows=4)
        memory.left = at
        boxes = driver.stagger(requests, lambda: 2)
        is_over, memory.left = memory.left > 0, 0
        failed = [box.error for box in boxes if box.error is not None]
        assert all(isinstance(error, EngineFailed) for error in failed), failed
        assert all(ALLOCATION in str(error) for error in failed)
        hit += bool(failed)
        for number in plain:
            assert_greedy(model, requests[number].tokens, boxes[number].tokens)
        again = [driver.submit(requests[number]) for number in plain]
        driver.run()
        for number, box in zip(plain, again, strict=True):
            assert box.end is not None, box.error
            assert_greedy(model, requests[number].tokens, box.tokens)
            assert len(box.tokens) == requests[number].max_tokens or 2 in box.tokens
        driver.check_idle()
        driver.engine.close()
        if is_over:
            break
    assert hit
