"""Log-probabilities of prompts: what the model alone says, however much of one was cached."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_swarm.broker import Request, Sampling
from mlx_swarm.broker.cache.extents import Extent
from mlx_swarm.broker.engine import prompt_logprobs
from mlx_swarm.broker.engine.prompt_logprobs import PromptLogprobs, gather
from mlx_swarm.broker.models import LoadedModel
from mlx_swarm.broker.request import TokenLogprob
from mlx_swarm.broker.trace import events
from tests.engine.driver import Box, Driver
from tests.engine.random_life import live
from tests.engine.test_logprobs import CLOSE, KINDS, Floats, check_item, log_softmax, model_of
from tests.tiny_broker import SHARED, prompt

MORE_KINDS = KINDS | {
    "lfm2": "synthetic:lfm2?layers=4&heads=4&kv_heads=2&hidden=64&context=512&seed=3&dtype=float32"
}
LONG = [(7 * at + at * at % 11) % 200 + 10 for at in range(100)]
ALWAYS_USABLE = ("llama", "qwen3", "deepseek_v3")
"""Kinds that can be cut after any token."""


def loaded(kind: str) -> LoadedModel:
    """A model, loaded once."""
    return model_of(MORE_KINDS[kind])


def asking(top: int = 0, **fields: Any) -> Request:
    """A request for its prompt's log-probabilities, with that many alternatives."""
    settings = {"max_tokens": 2, "logprobs": top > 0, "top_logprobs": top}
    return Request(**{**settings, "prompt_logprobs": True, **fields})


def alone(model: LoadedModel, tokens: Sequence[int]) -> Floats:
    """What mlx-lm's model says of a prompt in one piece. [tokens, vocabulary]"""
    return log_softmax(model.model(mx.array([list(tokens)]), cache=model.make_caches())[0])


def check_box(model: LoadedModel, request: Request, box: Box) -> None:
    """Assert what the model says alone, of all that was computed."""
    assert box.end is not None, box.error
    items, tokens = box.end.prompt_logprobs, list(request.tokens)
    if not request.prompt_logprobs:
        assert items == ()
        return
    assert len(items) == len(tokens)
    computed = [item for item in items if item is not None]
    assert items[0] is None
    assert list(items[1 : 1 + len(computed)]) == computed
    assert len(computed) == len(tokens) - 1 or box.end.finish_reason == "cancelled"
    for item, token, expected in zip(computed, tokens[1:], alone(model, tokens), strict=False):
        check_item(item, token, request.top_logprobs, expected, CLOSE)


def answer(driver: Driver, request: Request) -> Box:
    """A request that runs alone to its end, checked."""
    box = driver.submit(request)
    driver.run()
    check_box(driver.engine.model, request, box)
    driver.check_idle()
    return box


def planned(driver: Driver) -> events.Planned:
    """The last plan."""
    return [each for each in driver.recorder.events() if isinstance(each, events.Planned)][-1]


def drawn(data: st.DataObject) -> Callable[[int], Request]:
    """Requests over prompts that share much, asking for this or that."""

    def make(number: int) -> Request:
        top = data.draw(st.sampled_from([0, 0, 3, 20]))
        asks = data.draw(st.booleans())
        stem = data.draw(st.sampled_from([SHARED, LONG]))
        own = [(number % 3 * 31 + 3 * at) % 240 + 10 for at in range(data.draw(st.integers(1, 9)))]
        return asking(
            top,
            tokens=[*stem[: data.draw(st.sampled_from([0, 1, 17, 40, 60, 90]))], *own],
            max_tokens=data.draw(st.integers(1, 4)),
            prompt_logprobs=asks,
            boundaries=data.draw(st.sampled_from([(), (20, 40)])),
            cache=data.draw(st.sampled_from([True, True, True, False])),
        )

    return make


@pytest.mark.parametrize("kind", MORE_KINDS)
def test_a_prompt_s_are_the_same_however_much_of_it_is_cached(kind: str) -> None:
    """By itself, again, after a donor that did not ask, in part, and with alternatives."""
    driver = Driver(loaded(kind), chunk=16)
    first = answer(driver, asking(tokens=LONG))
    again = answer(driver, asking(tokens=LONG))
    assert first.end is not None
    assert again.end is not None
    assert [item and item.token for item in first.end.prompt_logprobs] == [None, *LONG[1:]]
    if kind in ALWAYS_USABLE:
        assert again.end.usage.ram_tokens == len(LONG) - 1
        assert again.end.prompt_logprobs == first.end.prompt_logprobs
    other = answer(driver, asking(tokens=[*LONG[:50], 3, 4, 5]))
    assert other.end is not None
    # The token at which they part is told by the one before, which is forwarded again.
    assert other.end.usage.ram_tokens <= 49
    assert other.end.usage.ram_tokens == 49 or kind not in ALWAYS_USABLE
    answer(driver, asking(tokens=LONG, cache=False))
    answer(driver, asking(5, tokens=LONG))
    assert (planned(driver).ram_tokens, planned(driver).reason) == (0, "no_logprobs")
    answer(driver, asking(tokens=SHARED, prompt_logprobs=False))
    answer(driver, asking(tokens=SHARED))
    assert (planned(driver).ram_tokens, planned(driver).reason) == (0, "no_logprobs")
    answer(driver, asking(tokens=SHARED))
    assert planned(driver).reason in (None, "no_checkpoint", "window_gone")
    driver.engine.close()


@pytest.mark.parametrize("kind", MORE_KINDS)
@settings(deadline=None, max_examples=8, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whoever_runs_beside_them_is_cancelled_or_evicted(kind: str, data: st.DataObject) -> None:
    model = loaded(kind)
    driver = Driver(
        model,
        max_rows=data.draw(st.integers(1, 4)),
        chunk=data.draw(st.sampled_from([7, 32, 512])),
        ram=data.draw(st.sampled_from([0, 120_000, 64 << 20])),
    )
    asked = live(data, driver, drawn(data), lambda _: None)
    for request, box in zip(asked, driver.boxes, strict=True):
        check_box(model, request, box)
    driver.engine.close()


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mamba2"])
@settings(deadline=None, max_examples=6, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_cold_tier_that_keeps_none_of_them(
    kind: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = loaded(kind)
    driver = Driver(model, ram=120_000, chunk=32, cold=tmp_path_factory.mktemp("cold"))
    asked = live(data, driver, drawn(data), lambda _: None)
    for request, box in zip(asked, driver.boxes, strict=True):
        check_box(model, request, box)
    driver.engine.close()


def test_what_comes_back_from_the_cold_tier_is_computed_again_and_then_known(
    tmp_path: Path,
) -> None:
    model = loaded("llama")
    driver = Driver(model, cold=tmp_path)
    answer(driver, asking(tokens=LONG))
    driver.engine.flush(10)
    driver.engine.cache.clear()
    # Nothing that the tier has is read for who would compute it again all the same.
    answer(driver, asking(tokens=LONG[:60]))
    plan = planned(driver)
    assert (plan.ram_tokens, plan.cold_tokens, plan.reason) == (0, 0, "no_logprobs")
    driver.engine.cache.clear()
    answer(driver, asking(tokens=LONG, prompt_logprobs=False))
    assert planned(driver).cold_tokens == len(LONG) - 1
    answer(driver, asking(tokens=LONG))
    assert (planned(driver).ram_tokens, planned(driver).reason) == (0, "no_logprobs")
    answer(driver, asking(tokens=LONG))
    assert planned(driver).ram_tokens == len(LONG) - 1
    driver.engine.close()


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mamba2", "deepseek_v3"])
def test_a_tile_that_the_limit_cuts_short_says_the_same(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_logprobs, "TILE_LOGITS", 4 * 300 * 9)
    model = loaded(kind)
    driver = Driver(model, chunk=512)
    asked = [asking(top, tokens=prompt(number, own=9)) for number, top in enumerate([0, 4, 20])]
    plain = Request(tokens=prompt(7, own=9), max_tokens=2)
    boxes = [driver.submit(request) for request in [*asked, plain]]
    driver.run()
    for request, box in zip([*asked, plain], boxes, strict=True):
        check_box(model, request, box)
    driver.engine.close()


def test_no_call_of_the_model_computes_more_logits_than_the_limit() -> None:
    for vocabulary in (1, 300, 128_256, 1 << 30):
        for top, copies in ((0, 1), (1, prompt_logprobs.ORDERING)):
            tile = PromptLogprobs(np.zeros(2, np.uint32), top, vocabulary).tile
            size = tile * vocabulary * 4 * copies
            assert tile == 1 or size <= prompt_logprobs.TILE_LOGITS
            assert 2 * size > prompt_logprobs.TILE_LOGITS


def test_who_does_not_ask_has_no_logits_computed_and_nothing_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gathered: list[int] = []

    def counting(logits: mx.array, parts: Any) -> list[mx.array]:
        gathered.append(len(logits))
        assert len(logits) == sum(count for *_, count in parts)
        return gather(logits, parts)

    monkeypatch.setattr("mlx_swarm.broker.engine.ahead.gather", counting)
    monkeypatch.setattr("mlx_swarm.broker.engine.decode_batch.gather", counting)
    driver = Driver(loaded("llama"))
    boxes = [driver.submit(Request(tokens=prompt(n), max_tokens=2)) for n in range(3)]
    driver.run()
    assert gathered == []
    before = driver.engine.cache.total_bytes
    extents: list[Extent] = driver.engine.cache._holdings.extents()
    assert all(extent.logprobs is None for extent in extents)
    asked = [asking(tokens=prompt(n)) for n in range(3)]
    boxes += [driver.submit(request) for request in asked]
    driver.run()
    assert sum(gathered) >= len(SHARED)
    assert all(extent.logprobs is not None for extent in extents)
    assert driver.engine.cache.total_bytes == before + 4 * sum(map(len, extents))
    driver.check_idle()
    driver.engine.close()


def test_those_who_ask_for_a_prefix_at_once_have_it_computed_once() -> None:
    driver = Driver(loaded("llama"), chunk=16)
    driver.submit(Request(tokens=prompt(9), max_tokens=2))
    driver.run()
    asked = [asking(tokens=prompt(number), max_tokens=4) for number in range(4)]
    boxes = [driver.submit(request) for request in asked]
    driver.run()
    for request, box in zip(asked, boxes, strict=True):
        check_box(driver.engine.model, request, box)
    prefilled = [box.end.usage.prefilled_tokens for box in boxes if box.end is not None]
    assert prefilled == [len(prompt(0)), 7, 7, 7]
    driver.check_idle()
    driver.engine.close()


def test_a_row_that_fails_in_its_prefill_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(loaded("llama"), chunk=16)

    def broken(logits: mx.array, parts: Any) -> list[mx.array]:
        raise MemoryError("no room for logits")

    with monkeypatch.context() as patch:
        patch.setattr("mlx_swarm.broker.engine.decode_batch.gather", broken)
        patch.setattr("mlx_swarm.broker.engine.ahead.gather", broken)
        failed = driver.submit(asking(tokens=LONG))
        beside = driver.submit(Request(tokens=SHARED, max_tokens=4))
        driver.run()
    assert "no room for logits" in str(failed.error)
    assert len(beside.tokens) == 4
    driver.check_idle()
    answer(driver, asking(tokens=LONG))
    driver.engine.close()


def test_what_cannot_be_read_fails_its_request_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(loaded("llama"))

    def broken(self: Any) -> list[Any]:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr("mlx_swarm.broker.engine.prompt_logprobs._Tile.read", broken)
        failed = driver.submit(asking(tokens=LONG))
        beside = driver.submit(Request(tokens=SHARED, max_tokens=4))
        driver.run()
    assert "the device is gone" in str(failed.error)
    assert len(beside.tokens) == 4
    driver.check_idle()
    driver.engine.close()


def test_sampling_does_not_touch_them() -> None:
    driver = Driver(loaded("llama"))
    hot = Sampling(
        temperature=1.5, top_k=3, repetition_penalty=1.7, logit_bias={17: 5.0}, xtc_probability=0.9
    )
    answer(driver, asking(4, tokens=LONG, sampling=hot))
    driver.engine.close()


def test_a_prompt_of_one_token_has_none() -> None:
    driver = Driver(loaded("llama"))
    box = answer(driver, asking(3, tokens=[5]))
    assert box.end is not None
    assert box.end.prompt_logprobs == (None,)
    driver.engine.close()


@given(
    top=st.integers(0, 20),
    vocabulary=st.sampled_from([1, 3, 20, 64]),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
@settings(deadline=None)
def test_prompts_that_share_a_tile_each_get_their_own(
    top: int, vocabulary: int, sizes: list[int], seed: int
) -> None:
    mx.random.seed(seed)
    prompts = [np.arange(size + 1, dtype=np.uint32) % vocabulary for size in sizes]
    asked = [PromptLogprobs(each, top, vocabulary) for each in prompts]
    logits = mx.random.normal((sum(sizes), vocabulary)) * 4
    gather(logits, [(each, 0, size) for each, size in zip(asked, sizes, strict=True)])
    expected, first = log_softmax(logits), 0
    for each, tokens in zip(asked, prompts, strict=True):
        items: tuple[TokenLogprob | None, ...] = each.items()
        assert items[0] is None
        for item, token, row in zip(items[1:], tokens[1:], expected[first:], strict=False):
            assert item is not None
            check_item(item, int(token), top, row, 1e-5)
        assert each.is_complete
        first += len(tokens) - 1
