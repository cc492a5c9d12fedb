"""Log-probabilities: the model's own in float32, an item a token, for the rows that ask alone."""

import copy
import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_swarm.broker import Completed, Delta, EngineFailed, Request, Sampling
from mlx_swarm.broker.engine import decode_batch
from mlx_swarm.broker.engine.logprobs import StepLogprobs, step_logprobs
from mlx_swarm.broker.models import LoadedModel, load
from mlx_swarm.broker.request import TokenLogprob
from tests.engine.driver import Box, Driver
from tests.engine.random_life import live
from tests.tiny_broker import SHARED, prompt

SIZES = "hidden=64&heads=4&kv_heads=2&intermediate=64&context=512&seed=3&dtype=float32"
SHARING = {
    "llama": f"synthetic:llama?layers=2&{SIZES}",
    "qwen3": f"synthetic:qwen3?layers=2&{SIZES}",
    "gemma3_text": f"synthetic:gemma3_text?layers=4&{SIZES}&window=16",
    "mamba2": "synthetic:mamba2?layers=2&hidden=64&context=512&seed=3&dtype=float32",
}
REPLICATED = {"deepseek_v3": "synthetic:deepseek_v3?layers=2&hidden=64&context=512&dtype=float32"}
KINDS = SHARING | REPLICATED
CLOSE = 1e-4
"""To the oracle; any two runs of a request then agree within twice that."""

Floats = npt.NDArray[np.float64]
counts = st.none() | st.sampled_from([0, 1, 3, 5, 6, 20])


@functools.cache
def model_of(kind: str) -> LoadedModel:
    """A model, loaded once."""
    return load(KINDS.get(kind, kind))


def asking(count: int | None, **fields: Any) -> Request:
    """A request for that many alternatives; for no log-probabilities with None."""
    return Request(logprobs=count is not None, top_logprobs=count or 0, **fields)


def log_softmax(logits: mx.array) -> Floats:
    """In float64, of logits as they are."""
    exact: Floats = np.array(logits.astype(mx.float32)).astype(np.float64)
    shifted: Floats = exact - exact.max(axis=-1, keepdims=True)
    total: Floats = np.exp(shifted).sum(axis=-1, keepdims=True)
    logprobs: Floats = shifted - np.log(total)
    return logprobs


def check_item(item: TokenLogprob, token: int, count: int, expected: Any, close: float) -> None:
    """Assert that an item says what the row `expected` [vocabulary] says."""
    assert item.token == token
    assert abs(item.logprob - expected[token]) <= close
    ids, logprobs = [each for each, _ in item.top], [logprob for _, logprob in item.top]
    assert len(set(ids)) == len(ids) == min(count, len(expected))
    assert logprobs == sorted(logprobs, reverse=True)
    highest = np.sort(expected)[::-1][: len(ids)]
    assert np.abs(np.array(logprobs) - highest).max(initial=0.0) <= close
    assert np.abs(np.array(logprobs) - expected[ids]).max(initial=0.0) <= close


def check_counts(box: Box, request: Request) -> None:
    """Assert that there is an item for each token that was given out, or none at all."""
    deltas = [event for event in box.events if isinstance(event, Delta)]
    events: list[Delta | Completed] = [*deltas, *([box.end] if box.end is not None else [])]
    for event in events:
        given_out = event.tokens if request.logprobs else ()
        assert tuple(item.token for item in event.logprobs) == given_out
    if box.end is not None:
        assert box.end.tokens == tuple(box.tokens)
        assert box.end.logprobs == tuple(item for delta in deltas for item in delta.logprobs)


def check_oracle(model: LoadedModel, request: Request, box: Box) -> None:
    """Assert what mlx-lm's model says of the tokens when it is alone."""
    check_counts(box, request)
    if box.end is None or not box.end.logprobs:
        return
    text = [*request.tokens, *box.end.tokens[:-1]]
    logits = model.model(mx.array([text]), cache=model.make_caches())[0]
    expected = log_softmax(logits[len(request.tokens) - 1 :])
    for item, token, row in zip(box.end.logprobs, box.end.tokens, expected, strict=True):
        check_item(item, token, request.top_logprobs, row, CLOSE)


@given(
    asked=st.lists(counts, min_size=1, max_size=6),
    vocabulary=st.sampled_from([1, 3, 5, 19, 20, 21, 64]),
    dtype=st.sampled_from([mx.float32, mx.bfloat16, mx.float16]),
    seed=st.integers(0, 1000),
)
@settings(deadline=None)
def test_a_row_gets_what_it_asks_for_from_float32_whatever_the_dtype(
    asked: list[int | None], vocabulary: int, dtype: mx.Dtype, seed: int
) -> None:
    shape = len(asked), vocabulary
    logits = (mx.random.normal(shape, key=mx.random.key(seed)) * 8 + 20).astype(dtype)
    tokens = mx.random.randint(0, vocabulary, shape[:1], key=mx.random.key(seed + 1))
    chosen: Any = tokens.tolist()
    items = step_logprobs(logits, tokens, asked).read(chosen)
    for item, token, count, row in zip(items, chosen, asked, log_softmax(logits), strict=True):
        assert (item is None) == (count is None)
        if item is not None and count is not None:
            check_item(item, token, count, row, 1e-5)


def test_of_equal_alternatives_the_lower_token_comes_first() -> None:
    logits = mx.array([[1.0, 2.0, 2.0, 1.0, 2.0]])
    (item,) = step_logprobs(logits, mx.array([2]), [4]).read([2])
    assert item is not None
    assert [token for token, _ in item.top] == [1, 2, 4, 0]


def test_a_step_in_which_nobody_asks_computes_nothing() -> None:
    nothing = step_logprobs(mx.zeros((2, 9)), mx.zeros(2, mx.uint32), [None, None])
    assert nothing.arrays == []
    assert nothing.read([0, 0]) == [None, None]


def test_only_rows_that_ask_are_computed_and_no_more_alternatives_than_their_bucket() -> None:
    logits, tokens = mx.zeros((4, 99)), mx.zeros(4, mx.uint32)
    for asked, shapes in (
        ([None, 0, None, 0], [(2,)]),
        ([None, 0, None, 1], [(2,), (2, 5), (2, 5)]),
        ([6, None, None, None], [(1,), (1, 20), (1, 20)]),
    ):
        assert [array.shape for array in step_logprobs(logits, tokens, asked).arrays] == shapes


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_join_and_leave_get_what_the_model_alone_says(kind: str) -> None:
    model = model_of(kind)
    driver = Driver(model, max_rows=4)
    hot = Sampling(temperature=1.5, top_p=0.9, top_k=40, seed=5)
    asked = [
        asking(
            count,
            tokens=prompt(agent, own=2 + agent),
            max_tokens=3 + 4 * (agent % 3),
            boundaries=(len(SHARED),),
            sampling=hot if agent % 2 else Sampling(),
        )
        for agent, count in enumerate([3, None, 0, 20, 5, None, 1])
    ]
    boxes = []
    for request in asked:
        boxes.append(driver.submit(request))
        driver.run(6)
    driver.run()
    lane = driver.engine.statistics().lane
    assert lane.prefixes == ("shared" if kind in SHARING else "replicated")
    for request, box in zip(asked, boxes, strict=True):
        assert len(box.tokens) == request.max_tokens
        check_oracle(model, request, box)
    driver.check_idle()
    driver.engine.close()


@pytest.mark.parametrize("kind", ["llama", "mamba2", "deepseek_v3"])
@settings(deadline=None, max_examples=6, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_there_is_an_item_for_each_token_whoever_is_cancelled_or_stopped(
    kind: str, data: st.DataObject
) -> None:
    model = model_of(kind)
    driver = Driver(model, max_rows=data.draw(st.integers(1, 4)))

    def make(number: int) -> Request:
        return asking(
            data.draw(counts),
            tokens=prompt(number, own=data.draw(st.integers(1, 5))),
            max_tokens=data.draw(st.integers(1, 12)),
            stop=data.draw(st.sampled_from([(), ("e",), ("a", "\ufffd"), (" ",)])),
        )

    def check(asked: list[Request]) -> None:
        for request, box in zip(asked, driver.boxes, strict=True):
            check_counts(box, request)

    for request, box in zip(live(data, driver, make, check), driver.boxes, strict=True):
        assert box.end is not None
        check_oracle(model, request, box)
    driver.engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_counts_the_tokens_that_completed_it(kind: str) -> None:
    model = model_of(kind)
    driver = Driver(model)
    plain = asking(2, tokens=prompt(0), max_tokens=24, sampling=Sampling(temperature=1.0, seed=2))
    whole = driver.submit(plain)
    driver.run()
    assert whole.end is not None
    stop = next(text for text in whole.end.text[3:] if text.isprintable() and text != "\ufffd")
    request = msgspec.structs.replace(plain, stop=(stop,))
    cut, beside = driver.submit(request), driver.submit(asking(None, tokens=[1], max_tokens=30))
    driver.run()
    assert cut.end is not None
    assert cut.end.finish_reason == "stop"
    assert 0 < len(cut.end.tokens) < len(whole.end.tokens)
    check_oracle(model, request, cut)
    assert beside.end is not None
    assert beside.end.logprobs == ()
    driver.engine.close()


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_a_row_that_fails_takes_nothing_from_the_others(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any, logprobs: mx.array, key: mx.array) -> mx.array:
        raise ValueError("no such filter")

    monkeypatch.setattr("mlx_swarm.broker.engine.sampling.RowSampler._choose", broken)
    model = model_of(kind)
    driver = Driver(model)
    asked = [
        asking(3, tokens=prompt(0), sampling=Sampling(temperature=1.0), max_tokens=8),
        asking(5, tokens=prompt(1), max_tokens=8),
        asking(None, tokens=prompt(2), max_tokens=8),
    ]
    boxes = [driver.submit(request) for request in asked]
    driver.run()
    assert isinstance(boxes[0].error, EngineFailed)
    for request, box in zip(asked[1:], boxes[1:], strict=True):
        assert len(box.tokens) == 8
        check_oracle(model, request, box)
    driver.check_idle()
    driver.engine.close()


class InBfloat16:
    """Calls a model, rounds its logits to bfloat16, and keeps those of single tokens."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.logits: list[mx.array] = []

    def __call__(self, tokens: mx.array, **named: Any) -> mx.array:
        logits: mx.array = self.model(tokens, **named).astype(mx.bfloat16)
        if tokens.shape == (1, 1):
            self.logits.append(logits[0, -1])
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_values_of_a_model_in_bfloat16_are_not_rounded_to_it(kind: str) -> None:
    model = copy.copy(model_of(kind))
    rounding: Any = InBfloat16(model.model)
    model.model = rounding
    driver = Driver(model, chunk=512)
    rounding.logits.clear()
    request = asking(5, tokens=prompt(0), max_tokens=6, cache=False)
    box = driver.submit(request)
    driver.run()
    check_counts(box, request)
    assert box.end is not None
    assert len(box.tokens) == 6
    for index, item in enumerate(box.end.logprobs):
        check_item(item, box.tokens[index], 5, log_softmax(rounding.logits[index]), 1e-5)
    driver.engine.close()


def test_the_next_step_is_on_its_way_before_a_step_s_values_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    read = StepLogprobs.read

    def started(*arguments: Any) -> StepLogprobs:
        order.append("start")
        return step_logprobs(*arguments)

    def reading(self: StepLogprobs, tokens: Sequence[int]) -> Any:
        order.append("read")
        return read(self, tokens)

    monkeypatch.setattr(decode_batch, "step_logprobs", started)
    monkeypatch.setattr(StepLogprobs, "read", reading)
    driver = Driver(model_of("llama"))
    driver.submit(asking(5, tokens=prompt(0), max_tokens=5))
    driver.run()
    # A row's last token is forwarded too, and what that step chose is never read.
    assert order == ["start", *["start", "read"] * 5]
    driver.engine.close()
