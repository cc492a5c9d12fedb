"""What goes wrong in the batch, or lacks memory, costs no other row anything."""

from typing import Any

import mlx.core as mx
import pytest

from mlx_swarm.broker import Request
from mlx_swarm.broker.cache import extents, kinds
from mlx_swarm.broker.cache.ledger import Purpose
from mlx_swarm.broker.engine import seat, sharing
from mlx_swarm.broker.engine.memory import weight_bytes
from mlx_swarm.broker.engine.row import Row
from mlx_swarm.broker.errors import EngineFailed
from mlx_swarm.broker.models import load
from tests.engine.driver import Driver, assert_greedy
from tests.engine.test_shared import KINDS, model_of
from tests.tiny_broker import SHARED, reference

LONG = [(7 * at) % 200 + 10 for at in range(200)]
BYTES_PER_TOKEN = 3 * 2 * 2 * 16 * 4


def test_no_row_goes_on_over_kv_that_a_failed_step_has_taken_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt half computed in the batch is lost with the batch, and is not answered from."""
    model = model_of("llama")
    driver = Driver(model, chunk=8)
    running = driver.submit(Request(tokens=[5, 6, 7], max_tokens=50))
    driver.decode_all([running], 3)
    half = driver.submit(Request(tokens=SHARED, max_tokens=6))
    decoder: Any = driver.engine.lane._shared
    while not any(0 < row.position < len(SHARED) - 1 for row in decoder.rows):
        driver.run(1)
    with monkeypatch.context() as patch:
        patch.setattr(decoder, "step", lambda: 1 / 0)
        while running.error is None:
            driver.run(1)
    assert isinstance(half.error, EngineFailed)
    driver.engine.check_integrity()
    again = driver.submit(Request(tokens=SHARED, max_tokens=6))
    driver.run()
    assert again.tokens == list(reference(model, SHARED, 6))
    driver.check_idle()


def test_a_row_copies_nothing_of_the_cache_that_it_has_no_memory_for() -> None:
    """It was admitted because most of its prompt is in the cache, so there it is read."""
    model = model_of("llama")
    driver = Driver(model, memory=weight_bytes(model) + 500 * BYTES_PER_TOKEN)
    driver.submit(Request(tokens=LONG, max_tokens=5))
    driver.run()
    driver.submit(Request(tokens=[3] * 10, max_tokens=250))
    driver.run(20)
    free = driver.engine.statistics().memory.free
    assert 30 * BYTES_PER_TOKEN <= free < 200 * BYTES_PER_TOKEN
    request = Request(tokens=[*LONG, 5, 6, 7], max_tokens=20)
    box = driver.submit(request)
    driver.run()
    assert box.error is None
    assert len(box.tokens) == 20
    assert_greedy(model, request.tokens, box.tokens)
    driver.check_idle()


def test_a_row_reads_no_further_in_the_cache_than_it_has_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another request has stored more of the same prompt, and is still reading it."""
    model = load(KINDS["llama"].replace("context=512", "context=1024"))
    driver = Driver(model, chunk=64)
    tokens = [(7 * at + at * at % 11) % 200 + 10 for at in range(600)]
    caches = model.make_caches()
    model.model(mx.array([tokens]), cache=caches)
    cache, take_in = driver.engine.cache, driver.engine.lane.seat
    leases: list[Any] = []

    def seat_late(row: Row) -> None:
        cache.put(tokens, caches, row.namespace)
        leases.append(cache.take(tokens, row.namespace))
        take_in(row)
        assert not leases[0].length <= row.position

    monkeypatch.setattr(driver.engine.lane, "seat", seat_late)
    box = driver.submit(Request(tokens=tokens, max_tokens=6, boundaries=(400,)))
    driver.run()
    assert box.tokens == list(reference(model, tokens, 6))
    leases[0].release()
    driver.check_idle()


def test_a_failure_while_room_is_made_ends_no_other_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compacting copies, just when memory is short."""
    model = model_of("llama")
    driver = Driver(model, memory=weight_bytes(model) + 500 * BYTES_PER_TOKEN)
    running = driver.submit(Request(tokens=[3] * 10, max_tokens=100))
    driver.decode_all([running], 3)
    monkeypatch.setattr(driver.engine.cache, "give_way", lambda nbytes: 1 / 0)
    box = driver.submit(Request(tokens=LONG, max_tokens=250))
    driver.run()
    assert isinstance(box.error, EngineFailed)
    assert running.tokens == list(reference(model, [3] * 10, 100))
    driver.check_idle()


def test_a_failure_while_room_is_made_for_a_copy_ends_no_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("llama")
    driver = Driver(model, chunk=128)
    monkeypatch.setattr(sharing, "LEAST_OWN_SPAN", 16)
    decoder: Any = driver.engine.lane._shared
    decoder._batch._placement._max_spans = 1
    asked = [Request(tokens=[at] * 61, max_tokens=10, boundaries=(60,)) for at in (3, 5)]
    boxes = [driver.submit(each) for each in asked]
    while driver.engine.scheduler.statistics().decoding < 2:
        driver.run(1)
    ledger = driver.engine.ledger
    ledger.charge(Purpose.SPILLS, ledger.free)
    monkeypatch.setattr(driver.engine.cache, "give_way", lambda nbytes: 1 / 0)
    driver.run(2)
    assert driver.engine.statistics().lane.batch.spans == 2
    driver.run()
    for request, box in zip(asked, boxes, strict=True):
        assert box.tokens == list(reference(model, request.tokens, 10))
    driver.check_idle()


def test_a_rebase_that_fails_ends_the_row_and_leaves_no_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("llama")
    driver = Driver(model)
    monkeypatch.setattr(sharing, "LEAST_OWN_SPAN", 16)
    first = driver.submit(Request(tokens=SHARED, max_tokens=30))
    driver.decode_all([first], 3)
    decoder: Any = driver.engine.lane._shared
    monkeypatch.setattr(decoder._batch, "rebase", lambda seat, path: 1 / 0)
    request = Request(tokens=[*SHARED, 7], max_tokens=8)
    second = driver.submit(request)
    driver.run()
    assert isinstance(first.error, EngineFailed)
    assert second.tokens == list(reference(model, request.tokens, 8))
    driver.check_idle()


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_what_finds_no_memory_to_be_stored_is_answered_all_the_same(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room on purpose")

    model = model_of(kind)
    driver = Driver(model, chunk=16)
    monkeypatch.setattr(extents, "pack", fail)
    monkeypatch.setattr(seat, "pack", fail)
    monkeypatch.setattr(kinds, "pack", fail)
    requests = [Request(tokens=[*SHARED, own], max_tokens=6) for own in range(3)]
    boxes = [driver.submit(each) for each in requests]
    driver.run()
    for request, box in zip(requests, boxes, strict=True):
        assert box.error is None
        assert box.tokens == list(reference(model, request.tokens, 6))
    driver.check_idle()


def test_nobody_waits_for_a_cache_that_is_off() -> None:
    """Waiting would compute the same prompts all the same, one after the other."""
    model = model_of("llama")
    driver = Driver(model, ram=0, chunk=1024)
    requests = [Request(tokens=[*LONG[:120], own], max_tokens=3) for own in range(6)]
    boxes = [driver.submit(each) for each in requests]
    while not any(box.tokens for box in boxes):
        driver.run(1)
        assert not driver.engine.scheduler.statistics().waiting
    driver.decode_all(boxes, 1)
    assert all(len(box.tokens) == 1 for box in boxes), "they were computed in one pass"
    driver.run()
    for request, box in zip(requests, boxes, strict=True):
        assert box.tokens == list(reference(model, request.tokens, 3))
    driver.check_idle()
