"""What pieces are said to have taken: from when the device was free for them, or longer."""

from collections.abc import Callable
from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_swarm.broker.engine import ahead as module
from mlx_swarm.broker.engine.ahead import Ahead


def test_every_piece_but_the_last_is_reported_in_order() -> None:
    heard: list[tuple[int, float]] = []
    ahead = Ahead(lambda tokens, seconds: heard.append((tokens, seconds)))
    for tokens in range(1, 6):
        ahead.start([mx.ones((4, 4)) * tokens], tokens)
    assert [tokens for tokens, _ in heard] == [1, 2, 3, 4]
    assert all(seconds > 0 for _, seconds in heard)


def test_a_piece_after_an_idle_time_is_not_said_to_be_shorter_than_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    dispatch: Callable[..., None] = mx.async_eval

    def slow_dispatch(*arrays: mx.array) -> None:
        nonlocal now
        now += 3.0
        dispatch(*arrays)

    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(mx, "async_eval", slow_dispatch)
    heard: list[float] = []
    ahead = Ahead(lambda tokens, seconds: heard.append(seconds))
    for _ in range(3):
        now += 100.0
        ahead.start([mx.ones((4, 4))], 1)
    # Nothing was waited for, so the second may have been under way while it was dispatched.
    assert heard[1] >= 103.0
