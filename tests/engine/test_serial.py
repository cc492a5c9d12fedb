"""The serial lane: a deterministic row is mlx-lm's to the last bit; no row leaves anything."""

import functools
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_swarm.broker import Grammar, InvalidRequest, Request, Sampling
from mlx_swarm.broker.engine.lane import Lane
from mlx_swarm.broker.engine.row import Row
from mlx_swarm.broker.engine.sampling import RowSampler
from mlx_swarm.broker.models import LoadedModel, load
from tests.engine.serial_driver import SerialDriver, alone, tokens_of
from tests.engine.test_shared import with_model
from tests.tiny_broker import SHARED

SIZES = "hidden=64&heads=4&kv_heads=2&intermediate=64&context=8192&seed=3"
KINDS = {
    "llama": f"synthetic:llama?layers=2&{SIZES}",
    "bfloat16": f"synthetic:llama?layers=2&{SIZES}&dtype=bfloat16",
    "windows": f"synthetic:gemma3_text?layers=2&{SIZES}&window=16",
    "state": "synthetic:mamba2?layers=2&hidden=64&context=8192&seed=3",
}
LONG = [(7 * at + at * at % 31) % 200 + 10 for at in range(4500)]


@functools.cache
def model_of(kind: str) -> LoadedModel:
    """A model, loaded once."""
    return load(KINDS.get(kind, kind))


def asked(tokens: list[int], **fields: Any) -> Request:
    """A deterministic request."""
    return Request(tokens=tokens, deterministic=True, **{"max_tokens": 8, **fields})


@pytest.mark.parametrize(
    ("length", "warm"),
    [*((length, warm) for length in (1, 2, 61, 2049) for warm in (False, True)), (4500, False)],
)
def test_a_deterministic_row_is_mlx_lm_s_to_the_last_bit(length: int, warm: bool) -> None:
    model = model_of("llama")
    driver = SerialDriver(model)
    prompt = LONG[:length]
    if warm:
        driver.run(Request(tokens=prompt, max_tokens=4))
    before = driver.cache.statistics()
    received = driver.run(asked(prompt, logprobs=True))
    expected = alone(model, prompt, 8)
    assert tokens_of(received) == expected.tokens
    logprobs = [each.logprob for each in received]
    for item, token, row in zip(logprobs, expected.tokens, expected.logprobs, strict=True):
        assert item is not None
        assert item.logprob == row[token].item(), "to the last bit"
    assert driver.cache.statistics() == before, "the cache was neither read nor written"


@pytest.mark.parametrize("kind", ["bfloat16", "windows", "state"])
def test_a_deterministic_row_is_mlx_lm_s_with_every_kind_of_cache(kind: str) -> None:
    model = model_of(kind)
    driver = SerialDriver(model)
    driver.run(Request(tokens=LONG[:2100], max_tokens=4))
    received = driver.run(asked(LONG[:2200], logprobs=True))
    expected = alone(model, LONG[:2200], 8)
    assert tokens_of(received) == expected.tokens
    for each, row in zip(received, expected.logprobs, strict=True):
        assert each.logprob is not None
        exact = row[each.token].item()
        # mlx-lm's are rounded to the model's dtype, ours are not.
        close = 0 if row.dtype == mx.float32 else 2**-7 * abs(exact)
        assert abs(each.logprob.logprob - exact) <= close


@settings(deadline=None, max_examples=15, suppress_health_check=list(HealthCheck))
@given(
    length=st.integers(1, 80),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.8, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_deterministic_row_is_sampled_by_its_own_seed_and_index(
    length: int, temperature: float, top_p: float, seed: int
) -> None:
    model = model_of("llama")
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    received = SerialDriver(model).run(asked(LONG[:length], sampling=sampling))
    expected = alone(model, LONG[:length], 8, RowSampler(sampling, seed))
    assert tokens_of(received) == expected.tokens


def test_a_deterministic_prompt_is_computed_in_whole_pieces_one_a_call() -> None:
    """Wherever the scheduler would stop: at boundaries of its own chunks it would differ."""
    driver = SerialDriver(model_of("llama"), chunk=100)
    row = driver.opened(asked(LONG, boundaries=(700,)))
    assert driver.prefill(row) == [2048, 4096, 4499]
    assert not driver.lane.store(row, 0)
    driver.lane.discard(row)
    driver.check_idle()


def test_sampling_and_grammars_are_as_in_the_batch() -> None:
    model = model_of("llama")
    driver = SerialDriver(model)
    ends = sorted(model.tokenizer.eos_token_ids)
    sampling = Sampling(min_tokens=5, logit_bias={ends[0]: 100, 7: -100})
    received = driver.run(asked(SHARED, sampling=sampling))
    assert tokens_of(received)[5:] == ends[:1]
    assert not set(tokens_of(received)[:5]) & {*ends, 7}
    assert received[-1].finish_reason == "stop"
    chosen = driver.run(asked(SHARED, grammar=Grammar(choice=["abc", "abd"]), max_tokens=20))
    text = model.tokenizer.decode(tokens_of(chosen))
    assert text.startswith(("abc", "abd"))
    assert chosen[-1].finish_reason == "stop"
    assert driver.run(asked(SHARED, max_tokens=3))[-1].finish_reason == "length"


def test_the_batch_lane_and_the_serial_lane_are_lanes() -> None:
    driver = SerialDriver(model_of("llama"))
    lanes: list[Lane] = [driver.lane, driver.batch]
    assert [lane.donates for lane in lanes] == [False, True]


def test_a_second_row_cannot_join_and_costs_the_first_nothing() -> None:
    driver = SerialDriver(model_of("llama"))
    first = driver.joined(asked(SHARED))
    received = driver.decode(2)
    second = driver.opened(asked(SHARED[:9]))
    driver.prefill(second)
    with pytest.raises(AssertionError, match="request-1 decodes"):
        driver.lane.join(second)
    driver.lane.discard(second)
    received += driver.decode()
    assert tokens_of(received) == alone(model_of("llama"), SHARED, 8).tokens
    driver.lane.keep(first)
    driver.check_idle()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("end", ["keep", "discard"])
@pytest.mark.parametrize("state", ["new", "opened", "prefilling", "joined", "decoding", "ended"])
def test_a_row_can_end_in_every_state(state: str, end: str, deterministic: bool) -> None:
    """Nothing is leaked, and what is kept is what was forwarded, over 20 tokens of another's."""
    model = model_of("llama")
    driver = SerialDriver(model)
    driver.run(Request(tokens=LONG[:20], max_tokens=1))
    request = Request(tokens=LONG[:100], max_tokens=6, deterministic=deterministic)
    row = driver.row(request)
    received = bring_to(driver, row, state)
    kept = driver.end(row, end)
    driver.check_idle()
    if end == "keep" and not deterministic:
        position = {"new": 0, "opened": 20, "prefilling": 32, "joined": 99}
        assert kept == position.get(state, 100 + len(received))
    after = [*LONG[:100], *tokens_of(received), 5, 6]
    if deterministic or end == "discard":
        assert driver.cache.peek_prefix_len(after, row.namespace) == 20
    else:
        assert driver.cache.peek_prefix_len(after, row.namespace) == max(20, kept)
        again = driver.run(Request(tokens=after, max_tokens=6))
        assert tokens_of(again) == alone(model, after, 6).tokens


def bring_to(driver: SerialDriver, row: Row, state: str) -> list[Any]:
    """Take a row that far; the tokens that it got."""
    if state != "new":
        driver.lane.open(row)
    if state == "prefilling":
        driver.lane.prefill(row, 32)
    if state in ("joined", "decoding", "ended"):
        driver.prefill(row)
        driver.lane.join(row)
    return driver.decode({"decoding": 3, "ended": 1 << 30}.get(state, 0))


class Failing:
    """A model that raises at its call of that number, counted from when that was set."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.fails_at = -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.fails_at -= 1
        if self.fails_at == 0:
            raise RuntimeError("on purpose")
        return self._model(*args, **named)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("at", [1, 3, 4, 5, 6, 9])
def test_a_model_that_raises_ends_that_row_alone(at: int, deterministic: bool) -> None:
    """In prefill, in the first step, in a later one; what is in doubt is not stored."""
    model = model_of("llama")
    failing = Failing(model.model)
    driver = SerialDriver(with_model(model, failing))
    request = Request(tokens=LONG[:97], max_tokens=8, deterministic=deterministic)
    row = driver.opened(request)
    failing.fails_at = at - 2 if deterministic and at > 2 else at
    with pytest.raises(RuntimeError, match="on purpose"):
        driver.finish(row)
    assert not driver.lane.running
    driver.lane.reset()
    driver.lane.discard(row)
    driver.check_idle()
    assert driver.cache.peek_prefix_len(LONG[:97], row.namespace) == 0
    assert tokens_of(driver.run(request)) == alone(model, LONG[:97], 8).tokens


def test_a_row_that_failed_stores_nothing_even_if_kept() -> None:
    model = model_of("llama")
    failing = Failing(model.model)
    driver = SerialDriver(with_model(model, failing))
    row = driver.joined(Request(tokens=SHARED, max_tokens=8))
    driver.decode(2)
    failing.fails_at = 1
    with pytest.raises(RuntimeError):
        driver.decode()
    assert driver.lane.keep(row) == 0
    driver.check_idle()


def test_closing_ends_what_runs() -> None:
    driver = SerialDriver(model_of("llama"))
    row = driver.joined(Request(tokens=SHARED, max_tokens=50))
    driver.decode(3)
    driver.lane.close()
    assert row.caches == []
    driver.check_idle()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"deterministic": 1}, "deterministic is 1; it must be True or False"),
        ({"draft": 5}, "draft is 5; it must be text"),
        ({"draft": "small", "deterministic": True}, "deterministic=True .* the draft 'small'"),
        ({"draft": "small", "grammar": Grammar(regex="a")}, "a grammar .* the draft 'small'"),
    ],
)
def test_what_does_not_go_together_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Request(text="a", **fields).validate()
