"""The serial lane beside the batch: turns, caches, drafts, failures and cancellation."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from mlx_swarm.broker import EngineFailed, Request, Sampling
from mlx_swarm.broker.engine.roster import ModelSource
from mlx_swarm.broker.errors import InvalidRequest, ModelBusy
from mlx_swarm.broker.models import LoadedModel, load
from tests.engine.driver import Box, Driver, assert_greedy
from tests.tiny_broker import TINY, prompt

DRAFT = TINY.replace("seed=3", "seed=4")


def asked(agent: int = 0, max_tokens: int = 12, **fields: Any) -> Request:
    return Request(tokens=prompt(agent), max_tokens=max_tokens, **fields)


def alone(model: LoadedModel, tokens: list[int], count: int) -> list[int]:
    """What mlx-lm generates with nobody else there."""
    ends = model.tokenizer.eos_token_ids
    found: list[int] = []
    for token, _ in generate_step(mx.array(tokens), model.model, max_tokens=count):
        found.append(int(token))
        if token in ends:
            break
    return found


def finished(box: Box) -> list[int]:
    assert box.error is None
    assert box.end is not None
    return box.tokens


def test_deterministic_requests_run_beside_a_batch_and_leave_no_trace_in_the_cache() -> None:
    driver = Driver(load(TINY))
    requests = [asked(agent, deterministic=agent % 2 == 1) for agent in range(6)]
    boxes = driver.stagger(requests, lambda: 3)
    for request, box in zip(requests, boxes, strict=True):
        if request.deterministic:
            assert finished(box) == alone(driver.engine.model, list(request.tokens), 12)
            assert box.end is not None
            assert box.end.usage.cached_tokens == 0
        else:
            assert_greedy(driver.engine.model, request.tokens, finished(box))
    driver.check_idle()
    puts = driver.engine.statistics().cache.total.puts
    driver.stagger([asked(7, deterministic=True)], lambda: 1)
    assert driver.engine.statistics().cache.total.puts == puts


def test_the_lanes_take_turns_and_neither_waits_for_the_end_of_the_other() -> None:
    driver = Driver(load(TINY), max_rows=4)
    boxes = [driver.submit(asked(0, 60, deterministic=True)), driver.submit(asked(1, 60))]
    driver.decode_all(boxes, 3)
    # What cannot run yet holds up nobody who can.
    waiting = driver.submit(asked(2, 4, deterministic=True))
    late = driver.submit(asked(3, 4))
    ahead = len(boxes[0].tokens) - len(boxes[1].tokens)
    while not late.over:
        driver.run(1)
        assert abs(len(boxes[0].tokens) - len(boxes[1].tokens) - ahead) <= 2
    assert not waiting.tokens
    driver.run()
    finished(waiting)
    driver.check_idle()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=7)])
def test_a_draft_changes_nothing_but_the_number_of_steps(sampling: Sampling) -> None:
    driver = Driver(load(TINY))
    driver.engine.load("same", ModelSource(TINY))
    driver.engine.load("draft", ModelSource(DRAFT))
    plain, same, other = driver.stagger(
        [asked(1, 16, sampling=sampling, draft=draft) for draft in ("", "same", "draft")],
        lambda: 1 << 30,
    )
    assert finished(same) == finished(plain) == finished(other)
    serial = driver.engine.statistics().models[driver.engine.model.name].serial
    assert serial.accepted_tokens >= 8
    assert serial.rounds < 32
    driver.check_idle()


def test_a_model_that_proposes_is_in_use() -> None:
    driver = Driver(load(TINY))
    driver.engine.load("draft", ModelSource(DRAFT))
    box = driver.submit(asked(0, 60, draft="draft"))
    driver.decode_all([box], 3)
    with pytest.raises(ModelBusy):
        driver.engine.unload("draft")
    driver.run()
    finished(box)
    driver.engine.unload("draft")
    unknown = driver.submit(asked(0, 60, draft="draft"))
    assert isinstance(unknown.error, InvalidRequest)
    driver.check_idle()


@pytest.mark.parametrize("fields", [{"deterministic": True}, {"draft": "draft"}])
def test_a_row_that_fails_in_one_lane_fails_alone(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(load(TINY))
    driver.engine.load("draft", ModelSource(DRAFT))
    serial: Any = driver.engine.roster.serving().serial
    boxes = [driver.submit(asked(0, 30, **fields)), driver.submit(asked(1, 30))]
    driver.decode_all(boxes, 3)

    def fail() -> None:
        monkeypatch.undo()
        raise RuntimeError("no more")

    monkeypatch.setattr(serial, "step", fail)
    driver.run()
    assert isinstance(boxes[0].error, EngineFailed)
    assert_greedy(driver.engine.model, prompt(1), finished(boxes[1]))
    again = driver.submit(asked(0, 6, **fields))
    driver.run()
    assert_greedy(driver.engine.model, prompt(0), finished(again))
    driver.check_idle()


@pytest.mark.parametrize("fields", [{"deterministic": True}, {"draft": "draft"}])
def test_cancelled_in_any_state_it_leaves_nothing(fields: dict[str, Any]) -> None:
    driver = Driver(load(TINY), chunk=16)
    driver.engine.load("draft", ModelSource(DRAFT))
    for turns in range(0, 24, 2):
        driver.submit(asked(turns, 10, **fields))
        driver.submit(asked(turns + 1, 10))
        driver.run(turns)
        driver.cancel(len(driver.boxes) - 2)
        driver.engine.check_integrity()
        driver.run()
        driver.check_idle()


def test_many_of_both_kinds_all_end() -> None:
    driver = Driver(load(TINY), max_rows=3)
    driver.engine.load("draft", ModelSource(DRAFT))
    kinds: list[Callable[[int], Request]] = [
        lambda agent: asked(agent, 5),
        lambda agent: asked(agent, 5, deterministic=True),
        lambda agent: asked(agent, 5, draft="draft"),
    ]
    requests = [kinds[agent % 3](agent) for agent in range(24)]
    for request, box in zip(requests, driver.stagger(requests, lambda: 1), strict=True):
        assert_greedy(driver.engine.model, request.tokens, finished(box))
    driver.check_idle()
