"""Every sampling feature in a batch: the tokens of mlx-lm alone, whoever joins and leaves."""

import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import stream_generate
from mlx_lm.sample_utils import (
    apply_min_p,
    apply_top_k,
    apply_top_p,
    apply_xtc,
    make_logits_processors,
)

from mlx_swarm.broker import EngineFailed, InvalidRequest, Request, Sampling
from mlx_swarm.broker.engine.admission import special_tokens_of
from mlx_swarm.broker.engine.sampling import RowSampler, draw_settings, draws_xtc, fold
from mlx_swarm.broker.models import LoadedModel
from tests.engine.driver import Driver
from tests.engine.test_logprobs import model_of
from tests.tiny_broker import SHARED, prompt

END = 2
SETTINGS = (
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(repetition_penalty=1.4),
    Sampling(repetition_penalty=1.2, repetition_context_size=0),
    Sampling(presence_penalty=1.5, presence_context_size=3),
    Sampling(frequency_penalty=0.8, frequency_context_size=0),
    Sampling(logit_bias={END: 100.0}, min_tokens=4),
    Sampling(logit_bias={11: 4.0, 12: -100.0}, presence_penalty=0.5, temperature=0.8),
    Sampling(temperature=1.2, xtc_probability=0.5, xtc_threshold=0.02, frequency_penalty=0.3),
    Sampling(temperature=0.9, top_p=0.9, min_p=0.02, top_k=30, repetition_penalty=1.1),
)


def alone(model: LoadedModel, request: Request, *more: Any) -> list[int]:
    """The tokens of mlx-lm alone, with its own processors and filters, and `more` processors."""
    sampling, ends = request.sampling, special_tokens_of(model).ends

    def restrained(tokens: mx.array, logits: mx.array) -> mx.array:
        if len(tokens) - len(request.tokens) < sampling.min_tokens:
            logits[:, list(ends)] = -mx.inf
        return logits

    names = ("repetition", "presence", "frequency")
    fields = [f"{name}_{what}" for name in names for what in ("penalty", "context_size")]
    arguments: dict[str, Any] = {name: getattr(sampling, name) for name in fields}
    processors = make_logits_processors(dict(sampling.logit_bias), **arguments)
    responses = stream_generate(
        model.model,
        model.tokenizer,
        list(request.tokens),
        max_tokens=request.max_tokens,
        sampler=seeded(model, sampling) if sampling.temperature else None,
        logits_processors=[*processors, restrained, *more],
    )
    return [response.token for response in responses][: request.max_tokens]


def seeded(model: LoadedModel, sampling: Sampling) -> Callable[[mx.array], mx.array]:
    """mlx-lm's filters, in its order, with the randomness of a row."""
    special = special_tokens_of(model)
    settings, indices = draw_settings(sampling, special.kept), iter(range(10**6))

    def choose(logprobs: mx.array) -> mx.array:
        assert sampling.seed is not None
        seed = fold(sampling.seed, next(indices))
        if sampling.top_p < 1.0:
            logprobs = apply_top_p(logprobs, sampling.top_p)
        if sampling.min_p:
            logprobs = apply_min_p(logprobs, sampling.min_p)
        if draws_xtc(settings, seed):
            logprobs = apply_xtc(logprobs, 1.0, sampling.xtc_threshold, list(special.kept))
        if sampling.top_k:
            logprobs = apply_top_k(logprobs, sampling.top_k)
        noise = mx.random.gumbel(logprobs.shape, key=mx.random.key(seed))
        return mx.argmax(logprobs * (1 / sampling.temperature) + noise, axis=-1)

    return choose


def asked(count: int, chance: random.Random) -> list[Request]:
    """Requests of every setting, with own seeds and lengths, some of equal prompts."""
    return [
        Request(
            tokens=prompt(number % 5, own=chance.randint(1, 6)),
            max_tokens=chance.randint(4, 14),
            sampling=replaced(SETTINGS[number % len(SETTINGS)], number),
            boundaries=(len(SHARED),),
            logprobs=chance.random() < 0.3,
        )
        for number in range(count)
    ]


def replaced(sampling: Sampling, seed: int) -> Sampling:
    """The same settings with a seed."""
    fields = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    return Sampling(**{**fields, "seed": seed})


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mamba2", "deepseek_v3"])
def test_a_row_with_any_setting_gets_the_tokens_of_mlx_lm_alone(kind: str) -> None:
    """Prompts share a cached prefix; rows are admitted and end at different times."""
    model, chance = model_of(kind), random.Random(5)
    requests = asked(20, chance)
    driver = Driver(model, max_rows=6)
    driver.stagger(requests, lambda: chance.randint(0, 4))
    for request, box in zip(requests, driver.boxes, strict=True):
        assert box.end is not None, box.error
        assert box.tokens == alone(model, request), request.sampling
    assert any(box.end and box.end.usage.cached_tokens for box in driver.boxes)
    driver.check_idle()
    driver.engine.close()


def test_a_row_s_end_and_stop_strings_wait_for_min_tokens() -> None:
    model = model_of("llama")
    driver = Driver(model)
    eager = Sampling(logit_bias={END: 100.0}, min_tokens=5)
    box = driver.submit(Request(tokens=prompt(0), max_tokens=9, sampling=eager))
    driver.run()
    assert len(box.tokens) == 6
    assert box.tokens[-1] == END
    assert box.end is not None
    assert box.end.finish_reason == "stop"
    stops = [chr(code) for code in range(0x21, 0x7F)]
    stopped = driver.submit(
        Request(
            tokens=prompt(1),
            max_tokens=9,
            stop=stops[:64],
            sampling=Sampling(logit_bias={40: 100.0}, min_tokens=3),
        )
    )
    driver.run()
    assert stopped.end is not None
    assert stopped.end.finish_reason == "stop"
    assert len(stopped.tokens) == 4
    assert len(stopped.end.text) == 3
    driver.engine.close()


def test_a_bias_outside_the_vocabulary_is_refused_with_the_numbers() -> None:
    driver = Driver(model_of("llama"))
    box = driver.submit(Request(tokens=prompt(0), sampling=Sampling(logit_bias={10**6: 1.0})))
    assert isinstance(box.error, InvalidRequest)
    assert "token 1000000" in str(box.error)
    assert "0 to 258" in str(box.error)
    driver.check_idle()
    driver.engine.close()


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_penalties_that_fail_end_their_row_alone(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> mx.array:
        raise ValueError("no such penalty")

    model = model_of(kind)
    driver = Driver(model)
    monkeypatch.setattr("mlx_swarm.broker.engine.sampling.penalise", broken)
    terse = Sampling(presence_penalty=1.0)
    boxes = [
        driver.submit(Request(tokens=prompt(row), max_tokens=5, sampling=sampling))
        for row, sampling in enumerate([terse, Sampling(), terse])
    ]
    driver.run()
    assert isinstance(boxes[0].error, EngineFailed)
    assert "no such penalty" in str(boxes[2].error)
    assert len(boxes[1].tokens) == 5
    driver.check_idle()
    driver.engine.close()


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_penalties_leave_the_model_s_own_log_probabilities_alone(kind: str) -> None:
    model = model_of(kind)
    request = Request(
        tokens=prompt(0),
        max_tokens=6,
        logprobs=True,
        top_logprobs=1,
        sampling=Sampling(repetition_penalty=3.0, repetition_context_size=0),
    )
    driver = Driver(model)
    box = driver.submit(request)
    driver.run()
    text = [*request.tokens, *box.tokens[:-1]]
    logits = model.model(mx.array([text]), cache=model.make_caches())[0, len(request.tokens) - 1 :]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    for row, item in enumerate(box.logprobs):
        assert abs(item.logprob - logprobs[row, item.token].item()) < 1e-4
    assert any(item.top[0][0] != item.token for item in box.logprobs)
    driver.engine.close()


def test_rows_that_ask_for_nothing_pay_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> mx.array:
        raise AssertionError("nobody asked for this")

    monkeypatch.setattr("mlx_swarm.broker.engine.sampling.penalise", never)
    monkeypatch.setattr("mlx_swarm.broker.engine.sampling.note", never)
    driver = Driver(model_of("llama"))
    for row, sampling in enumerate([Sampling(), Sampling(temperature=1.0)]):
        driver.submit(Request(tokens=prompt(row), max_tokens=4, sampling=sampling))
    driver.run()
    assert all(len(box.tokens) == 4 for box in driver.boxes)
    sampler = RowSampler(Sampling(temperature=1.0), 1)
    assert sampler.penalties is None
    driver.engine.close()
