"""Rows that share their prefix: tokens as mlx-lm's, one copy of the prefix, nothing left behind."""

import copy
import functools
import gc
import itertools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_swarm.broker import Request, Sampling
from mlx_swarm.broker.engine.decode_batch import PrefillLimits
from mlx_swarm.broker.engine.leaders import MINIMUM_SHARED_TOKENS
from mlx_swarm.broker.engine.row import Row
from mlx_swarm.broker.models import LoadedModel, load
from tests.engine.driver import Driver, assert_greedy
from tests.engine.random_life import live
from tests.tiny_broker import SHARED, prompt, reference

SIZES = "hidden=64&heads=4&kv_heads=2&intermediate=64&context=512&seed=3"
KINDS = {
    "llama": f"synthetic:llama?layers=3&{SIZES}",
    "qwen3": f"synthetic:qwen3?layers=3&{SIZES}",
    "gemma3_text": f"synthetic:gemma3_text?layers=4&{SIZES}&window=16",
    "gpt_oss": f"synthetic:gpt_oss?layers=4&{SIZES}&window=16",
    "mamba2": "synthetic:mamba2?layers=2&hidden=64&context=512&seed=3",
    "lfm2": f"synthetic:lfm2?layers=4&{SIZES}",
}


@functools.cache
def model_of(kind: str) -> LoadedModel:
    """A model, loaded once."""
    return load(KINDS.get(kind, kind))


def with_model(model: LoadedModel, instead: Any) -> LoadedModel:
    """A loaded model whose steps another object does."""
    other = copy.copy(model)
    other.model = instead
    return other


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """One of a few families of prompts, some of them nested, with tokens of its own."""
    family = draw(st.integers(0, 2))
    shared = SHARED[: draw(st.sampled_from([0, 5, 40, 60]))]
    shared = [(token + 31 * family) % 250 for token in shared]
    own = draw(st.lists(st.integers(1, 250), min_size=1, max_size=12))
    is_marked = bool(shared) and draw(st.booleans())
    return Request(
        tokens=[*shared, *own],
        max_tokens=draw(st.integers(1, 24)),
        cache=draw(st.sampled_from([True, True, True, False])),
        boundaries=(len(shared),) if is_marked else (),
    )


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=6, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_mix_of_joins_leaves_cancels_and_hits_gives_mlx_lm_s_tokens(
    kind: str, data: st.DataObject
) -> None:
    model = model_of(kind)
    driver = Driver(model, max_rows=data.draw(st.integers(1, 8)))
    asked = live(
        data, driver, lambda _: data.draw(requests()), lambda _: driver.engine.check_integrity()
    )
    for request, box in zip(asked, driver.boxes, strict=True):
        assert box.error is None
        assert box.end is not None
        assert_greedy(model, request.tokens, box.tokens)
        assert len(box.tokens) == request.max_tokens or box.end.finish_reason != "length"
    driver.engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_shared_and_equal_mlx_lm_s_own_generation(kind: str) -> None:
    model = model_of(kind)
    driver = Driver(model)
    asked = [
        Request(tokens=prompt(agent, own=3 + agent), max_tokens=10, boundaries=(len(SHARED),))
        for agent in range(5)
    ]
    boxes = [driver.submit(each) for each in asked]
    driver.decode_all(boxes, 4)
    lane = driver.engine.statistics().lane
    assert (lane.prefixes, lane.reason) == ("shared", "")
    if kind != "mamba2":
        assert lane.batch.span_tokens >= len(SHARED)
    driver.run()
    for request, box in zip(asked, boxes, strict=True):
        assert box.tokens == list(reference(model, request.tokens, 10))
    driver.check_idle()


def test_more_families_than_spans_are_served_all_the_same() -> None:
    """Every family has a prefix of its own, longer than what is copied without need."""
    model = load(KINDS["llama"].replace("context=512", "context=1024"))
    driver = Driver(model, max_rows=12, chunk=512)
    asked = [
        Request(tokens=[*((at * 7 + 31 * family) % 250 for at in range(520)), 9], max_tokens=60)
        for family in range(11)
    ]
    boxes = [driver.submit(each) for each in asked]
    driver.decode_all(boxes, 2)
    batch = driver.engine.statistics().lane.batch
    assert batch.spans == 8
    assert batch.tails.used_bytes >= 2 * 520 * 3 * 2 * 2 * 16 * 4
    driver.run()
    for request, box in zip(asked, boxes, strict=True):
        assert_greedy(model, request.tokens, box.tokens)
    driver.check_idle()


def test_a_thousand_tokens_shared_by_many_rows_are_in_memory_once() -> None:
    model = load(KINDS["llama"].replace("context=512", "context=4096"))
    shared = [(7 * at) % 200 + 10 for at in range(2048)]
    bytes_per_token = 3 * 2 * 2 * 16 * 4

    def memory(rows: int) -> tuple[int, int]:
        driver = Driver(model, max_rows=rows, chunk=512)
        asked = [
            Request(tokens=[*shared, 20 + row, 30], max_tokens=40, boundaries=(len(shared),))
            for row in range(rows)
        ]
        gc.collect()
        mx.clear_cache()
        before = mx.get_active_memory()
        boxes = [driver.submit(each) for each in asked]
        driver.decode_all(boxes, 8)
        mx.synchronize()
        taken = mx.get_active_memory() - before
        statistics = driver.engine.statistics()
        driver.run()
        driver.check_idle()
        driver.engine.close()
        return taken, statistics.lane.batch.tails.bytes

    one_copy = 2048 * bytes_per_token
    assert memory(1)[0] >= one_copy
    taken, tails = memory(24)
    assert taken - tails <= 1.05 * one_copy


def test_a_running_row_pins_only_what_it_reads_where_it_lies() -> None:
    """Its own part of the prompt is in its tail only, and stored when it ends."""
    driver = Driver(model_of("llama"))
    asked = [
        Request(tokens=prompt(agent, own=20), max_tokens=30, boundaries=(len(SHARED),))
        for agent in range(3)
    ]
    boxes = [driver.submit(each) for each in asked]
    driver.decode_all(boxes, 2)
    cache = driver.engine.statistics().cache
    assert cache.leases == 2, "the first one computed the shared part in its own tail"
    assert cache.total.leased_bytes == len(SHARED) * 3 * 2 * 2 * 16 * 4
    assert cache.total.extent_bytes == cache.total.leased_bytes
    driver.run()
    driver.check_idle()
    stored = driver.engine.statistics().cache.total.extent_bytes
    assert stored == (len(SHARED) + 3 * (20 + 30)) * 3 * 2 * 2 * 16 * 4


def test_donors_stay_bit_identical() -> None:
    model = model_of("llama")
    driver = Driver(model)
    donor = Request(tokens=prompt(0), max_tokens=6, boundaries=(len(SHARED),))
    driver.submit(donor)
    driver.run()
    namespace = next(iter(driver.engine.statistics().cache.namespaces))
    extents = driver.engine.cache._holdings.extents(namespace)
    before = [[np.array(buffer) for buffer in extent.buffers] for extent in extents]
    for agent in range(1, 6):
        driver.submit(Request(tokens=prompt(agent), max_tokens=12))
    driver.submit(donor)
    driver.run()
    for extent, held in zip(extents, before, strict=True):
        assert len(extent.buffers) == len(held)
        for buffer, expected in zip(extent.buffers, held, strict=True):
            assert np.array_equal(np.array(buffer), expected)


class FailingModel:
    """Calls a model, and fails at one call."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.left = 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise MemoryError("no room on purpose")
        return self.model(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_a_failure_at_any_call_of_the_model_leaves_nothing(kind: str) -> None:
    model = model_of(kind)
    asked = [Request(tokens=prompt(agent), max_tokens=4) for agent in range(3)]
    for at in itertools.count(1):
        failing: Any = FailingModel(model.model)
        driver = Driver(with_model(model, failing))
        failing.left = at
        for request in asked:
            driver.submit(request)
        driver.run()
        driver.check_idle()
        failed = [box for box in driver.boxes if box.error is not None]
        for request, box in zip(asked, driver.boxes, strict=True):
            assert_greedy(model, request.tokens, box.tokens)
        failing.left = 0
        again = driver.submit(asked[0])
        driver.run()
        assert again.end is not None
        driver.engine.close()
        if not failed:
            break
    assert at > 5


def test_rows_keep_their_own_sampling_whoever_joins_and_leaves() -> None:
    model = model_of("llama")
    settings_of = [
        Sampling(),
        Sampling(temperature=0.8, seed=1),
        Sampling(temperature=0.8, seed=2),
        Sampling(temperature=1.2, top_p=0.9, seed=3),
        Sampling(temperature=0.8, seed=1),
    ]
    asked = [
        Request(tokens=prompt(0), max_tokens=6 + 3 * index, sampling=sampling)
        for index, sampling in enumerate(settings_of)
    ]
    alone = []
    for request in asked:
        driver = Driver(model)
        alone.append(driver.submit(request))
        driver.run()
    boxes = Driver(model).stagger(asked, lambda: 7)
    assert [box.tokens for box in boxes] == [box.tokens for box in alone]
    assert boxes[1].tokens == boxes[4].tokens[: len(boxes[1].tokens)]


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"mamba2", "lfm2"}))
def test_many_prompts_are_computed_in_one_pass(kind: str) -> None:
    """Of any lengths, over a prefix or without one, beside rows that decode already."""
    model = model_of(kind)
    calls = CountingModel(model.model)
    driver = Driver(with_model(model, calls), chunk=512, max_rows=12)
    first = driver.submit(Request(tokens=prompt(9), max_tokens=40, boundaries=(len(SHARED),)))
    driver.decode_all([first], 3)
    asked = [Request(tokens=prompt(row, own=1 + 7 * row), max_tokens=9) for row in range(6)]
    asked += [Request(tokens=[*range(11, 11 + own)], max_tokens=9) for own in (1, 2, 30)]
    boxes = [driver.submit(each) for each in asked]
    before = calls.prompts
    driver.decode_all(boxes, 1)
    assert calls.prompts - before == 1
    driver.run()
    for request, box in zip(asked, boxes, strict=True):
        assert box.tokens == list(reference(model, request.tokens, 9))
    assert first.tokens == list(reference(model, prompt(9), 40))
    driver.check_idle()


class CountingModel(FailingModel):
    """Counts the calls that compute more than a token a row of what decodes."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.prompts = 0

    def __call__(self, tokens: mx.array, **named: Any) -> Any:
        self.prompts += tokens.size > 16
        return super().__call__(tokens, **named)


def test_a_row_that_computed_a_long_prefix_reads_it_where_it_is_stored() -> None:
    """It keeps no copy in its tail once others share it."""
    model = load(KINDS["llama"].replace("context=512", "context=2048"))
    driver = Driver(model, chunk=1024)
    decoder: Any = driver.engine.lane._shared
    decoder._limits = PrefillLimits(2048)
    shared = [(7 * at) % 200 + 10 for at in range(900)]
    asked = [Request(tokens=[*shared, 20 + row, 30], max_tokens=20) for row in range(4)]
    boxes = [driver.submit(each) for each in asked]
    driver.decode_all(boxes, 3)
    batch = driver.engine.statistics().lane.batch
    assert (batch.spans, batch.span_tokens) == (1, 900)
    assert batch.tails.used_bytes <= 4 * 30 * 3 * 2 * 2 * 16 * 4
    driver.run()
    for request, box in zip(asked, boxes, strict=True):
        assert_greedy(model, request.tokens, box.tokens)
    driver.check_idle()


@pytest.mark.parametrize("length", [257, 300, 320, 321, 335, 336, 500])
def test_the_odd_rest_of_a_long_prompt_is_computed_in_the_batch(length: int) -> None:
    driver = Driver(load(KINDS["llama"]), chunk=64)
    lane = driver.engine.lane
    lane.aligned = 32
    alone: list[tuple[int, int]] = []
    prefill = lane.prefill

    def watched(row: Row, stop: int) -> None:
        alone.append((row.position, stop))
        prefill(row, stop)

    lane.prefill = watched  # type: ignore[method-assign]
    tokens = [at % 250 for at in range(length)]
    box = driver.submit(Request(tokens=tokens, max_tokens=6))
    driver.run()
    # A rest of a few tokens is not worth a stop of its own.
    rest = (length - 1) % 32
    odd = [length - 1] if 0 < rest < MINIMUM_SHARED_TOKENS and length > 257 else []
    assert [stop for _, stop in alone if stop % 32] == odd
    assert bool(alone) is (length > 257)
    assert_greedy(driver.engine.model, tokens, box.tokens)
    driver.check_idle()


def test_a_prefill_of_many_that_fails_ends_them_and_nobody_else() -> None:
    model = model_of("llama")
    failing: Any = FailingModel(model.model)
    driver = Driver(with_model(model, failing), chunk=512)
    running = driver.submit(Request(tokens=prompt(9), max_tokens=40, boundaries=(len(SHARED),)))
    driver.decode_all([running], 3)
    boxes = [driver.submit(Request(tokens=prompt(row, own=20), max_tokens=9)) for row in range(3)]
    while not driver.engine.scheduler.statistics().prefilling == 3:
        driver.run(1)
    failing.left = 1
    driver.run()
    assert all("on purpose" in str(box.error) for box in boxes)
    assert running.tokens == list(reference(model, prompt(9), 40))
    driver.check_idle()
