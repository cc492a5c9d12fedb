"""Steps that give a row several tokens: what comes after its end is nobody's."""

import pytest

from mlx_swarm.broker import Completed, Delta, Request
from mlx_swarm.broker.engine.row import RowToken
from mlx_swarm.broker.engine.text import TextStream
from mlx_swarm.broker.errors import EngineFailed
from tests.engine.driver import Driver
from tests.engine.test_shared import model_of
from tests.tiny_broker import SHARED, reference

PAIR = [SHARED, SHARED[:40]]


def test_a_row_that_ends_at_a_stop_string_gets_no_more_tokens_of_that_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("llama")
    expected = [reference(model, prompt, 12) for prompt in PAIR]
    stop = model.tokenizer.decode(list(expected[0][:5]))[-2:]
    driver = Driver(model)
    step = driver.engine.lane.step

    computed: list[int] = []

    def four() -> list[RowToken]:
        received = [token for _ in range(4) for token in step()]
        computed.extend(each.token for each in received if len(each.row.prompt) == len(SHARED))
        return received

    monkeypatch.setattr(driver.engine.lane, "step", four)
    ended = driver.submit(Request(tokens=PAIR[0], max_tokens=12, stop=[stop]))
    other = driver.submit(Request(tokens=PAIR[1], max_tokens=12))
    driver.run()
    assert isinstance(ended.events[-1], Completed)
    assert sum(isinstance(event, Completed) for event in ended.events) == 1
    assert ended.end is not None
    assert ended.end.finish_reason == "stop"
    assert ended.end.tokens == tuple(ended.tokens) == expected[0][: len(ended.tokens)]
    assert computed[: len(ended.tokens)] == ended.tokens
    assert len(computed) > len(ended.tokens), "it ended within a step"
    assert other.tokens == list(expected[1])
    driver.check_idle()


def test_a_row_that_failed_within_a_step_gets_no_more_tokens_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(model_of("llama"))
    step = driver.engine.lane.step

    def three() -> list[RowToken]:
        return [token for _ in range(3) for token in step()]

    def fail_once(stream: TextStream, token: int) -> str:
        monkeypatch.setattr(TextStream, "add", add)
        raise ZeroDivisionError

    add = TextStream.add
    monkeypatch.setattr(TextStream, "add", fail_once)
    monkeypatch.setattr(driver.engine.lane, "step", three)
    box = driver.submit(Request(tokens=SHARED, max_tokens=12))
    driver.run()
    assert isinstance(box.error, EngineFailed)
    assert not [event for event in box.events if isinstance(event, Delta)]
    driver.check_idle()
