"""Faults that users of other engines have met, each under its number in the list of them."""

import threading

import pytest

from mlx_swarm.broker import Request, Sampling
from mlx_swarm.broker.affinity import ThreadGuard
from mlx_swarm.broker.engine import loop
from tests.engine.driver import Driver, assert_greedy
from tests.engine.test_shared import KINDS, model_of
from tests.tiny_broker import SHARED, prompt


def alone(request: Request, kind: str = "llama") -> tuple[list[int], str]:
    """What a request gets with nobody beside it."""
    driver = Driver(model_of(kind))
    box = driver.submit(request)
    driver.run()
    assert box.end is not None
    return box.tokens, box.end.text


def test_25_rows_keep_their_own_stops_when_the_batch_changes() -> None:
    free = Request(tokens=prompt(0), max_tokens=40, sampling=Sampling(temperature=1.5, seed=4))
    text = alone(free)[1]
    pieces = [text[at : at + 2] for at in range(4, len(text) - 2, 3)][:6]
    asked = [
        Request(tokens=prompt(0), max_tokens=40, sampling=free.sampling, stop=(piece,))
        for piece in pieces
    ]
    driver = Driver(model_of("llama"))
    boxes = driver.stagger([free, *asked], lambda: 5)
    for request, box in zip([free, *asked], boxes, strict=True):
        assert box.end is not None
        assert box.end.text == alone(request)[1]
        assert not any(stop in box.end.text for stop in request.stop)
    assert len({box.end and box.end.text for box in boxes}) > 2
    driver.check_idle()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_27_distinct_tails_on_one_donor_do_not_leak_into_each_other(kind: str) -> None:
    model = model_of(kind)
    driver = Driver(model, max_rows=12)
    driver.submit(Request(tokens=[*SHARED, 5], max_tokens=1))
    driver.run()
    asked = [Request(tokens=prompt(agent, own=1 + agent), max_tokens=8) for agent in range(12)]
    boxes = [driver.submit(each) for each in asked]
    driver.run()
    for request, box in zip(asked, boxes, strict=True):
        assert box.tokens == alone(request, kind)[0]
        assert_greedy(model, request.tokens, box.tokens)
    driver.check_idle()


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mamba2"])
def test_34_what_an_aborted_request_had_half_written_is_never_served(kind: str) -> None:
    model = model_of(kind)
    request = Request(tokens=[*SHARED, *range(20, 90)], max_tokens=6)
    for turns in range(1, 16):
        driver = Driver(model, chunk=16)
        driver.submit(request)
        driver.run(turns)
        driver.cancel(0)
        kept = driver.engine.cache.plan(request.tokens, _namespace(driver)).ram_tokens
        again = driver.submit(request)
        driver.run()
        assert again.end is not None
        assert again.end.usage.ram_tokens == kept
        assert_greedy(model, request.tokens, again.tokens)
        driver.check_idle()


def test_37_what_rests_too_long_leaves_memory_and_stays_reachable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "LOOK_SECONDS", 0.0)
    driver = Driver(model_of("llama"))
    looked: list[float] = []
    monkeypatch.setattr(driver.engine.cache, "demote_idle", looked.append)
    driver.submit(Request(tokens=prompt(1), max_tokens=2))
    while driver.engine.turn():
        assert not looked
    assert looked == [loop.IDLE_SECONDS]


def test_44_a_second_thread_that_touches_what_mlx_made_fails_at_once() -> None:
    guard, caught = ThreadGuard(), list[AssertionError]()
    guard.check()

    def touch() -> None:
        with pytest.raises(AssertionError, match="called from thread") as error:
            guard.check()
        caught.append(error.value)

    thread = threading.Thread(target=touch)
    thread.start()
    thread.join()
    assert len(caught) == 1


def _namespace(driver: Driver) -> str:
    return next(iter(driver.engine.cache.statistics().namespaces), "")
