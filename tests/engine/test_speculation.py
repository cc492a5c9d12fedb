"""Speculation: whatever the draft model proposes, the output is the model's own, and what is stored
of either is what it has computed.
"""

import functools
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_swarm.broker import InvalidRequest, Request, Sampling
from mlx_swarm.broker.engine.row import Row, RowToken
from mlx_swarm.broker.engine.speculation import DRAFT_PIECE
from mlx_swarm.broker.errors import ContextOverflow, EngineFailed, InvalidSetting
from mlx_swarm.broker.models import LoadedModel, load
from tests.engine.driver import assert_greedy
from tests.engine.serial_driver import SerialDriver, alone, tokens_of
from tests.engine.test_serial import Failing
from tests.engine.test_serial_unbatchable import llama4
from tests.engine.test_shared import with_model

SIZES = "hidden=64&heads=4&kv_heads=2&intermediate=64&context=2048"
MAIN = f"synthetic:llama?layers=2&{SIZES}&seed=3"
DRAFTS = {
    "itself": MAIN,
    "half": f"synthetic:llama?layers=1&{SIZES}&seed=3",  # its layer is the model's first one
    "stranger": f"synthetic:qwen3?layers=1&{SIZES}&seed=8",
    "erring": "",
}
PROMPT = [(7 * at + at * at % 31) % 200 + 10 for at in range(1190)]


class Erring:
    """A model that is wrong about what follows every third token."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: mx.array, **named: Any) -> Any:
        logits = self._model(tokens, **named)
        return mx.where((tokens % 3 == 0)[..., None], logits[..., ::-1], logits)


@functools.cache
def model_of(name: str) -> LoadedModel:
    """A model, loaded once."""
    if name != "erring":
        return load(DRAFTS.get(name, name))
    model = model_of("itself")
    erring = with_model(model, Erring(model.model))
    erring.identity = msgspec.structs.replace(model.identity, weights="erring")
    return erring


def driver_of(model: LoadedModel | None = None, **settings: Any) -> SerialDriver:
    """A lane with all drafts."""
    drafts = {name: model_of(name) for name in DRAFTS}
    return SerialDriver(model or model_of("itself"), drafts, **settings)


def plain(request: Request) -> list[RowToken]:
    """What a request gets without a draft and without a cache."""
    fields = {name: getattr(request, name) for name in ("tokens", "max_tokens", "sampling")}
    asked = Request(**fields, deterministic=True, logprobs=True, top_logprobs=3)
    return SerialDriver(model_of("itself")).run(asked)


def held_by_draft(driver: SerialDriver, request: Request, row: Row, tokens: list[int]) -> int:
    """How many of the tokens the cache has for the draft model."""
    assert row.draft is not None
    return driver.cache.peek_prefix_len([*request.tokens, *tokens, 1, 2], row.draft.namespace)


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_p=st.sampled_from([1.0, 0.9]),
    top_k=st.sampled_from([0, 20]),
    seed=st.integers(0, 2**32),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    frequency_context_size=st.sampled_from([0, 7]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    xtc_probability=st.sampled_from([0.0, 0.5]),
    logit_bias=st.sampled_from([{}, {7: 3.0, 2: 4.0}]),
    min_tokens=st.integers(0, 5),
)


@pytest.mark.parametrize("draft", DRAFTS)
@settings(deadline=None, max_examples=12, suppress_health_check=list(HealthCheck))
@given(
    length=st.integers(1, 90),
    max_tokens=st.integers(5, 24),
    draft_tokens=st.integers(1, 5),
    sampling=samplings,
)
def test_the_output_is_that_without_a_draft_with_any_sampling(
    draft: str, length: int, max_tokens: int, draft_tokens: int, sampling: Sampling
) -> None:
    driver = driver_of(draft_tokens=draft_tokens)
    request = Request(
        tokens=PROMPT[:length],
        max_tokens=max_tokens,
        sampling=sampling,
        draft=draft,
        logprobs=True,
        top_logprobs=3,
    )
    received, expected = driver.run(request), plain(request)
    assert tokens_of(received) == tokens_of(expected)
    assert [each.finish_reason for each in received] == [each.finish_reason for each in expected]
    for each, other in zip(received, expected, strict=True):
        got, wanted = each.logprob, other.logprob
        assert got is not None
        assert wanted is not None
        assert got.token == each.token
        assert got.logprob == pytest.approx(wanted.logprob, abs=1e-4)
        assert [at for _, at in got.top] == pytest.approx([at for _, at in wanted.top], abs=1e-4)
    counts = driver.lane.statistics()
    assert counts.accepted_tokens <= counts.drafted_tokens <= draft_tokens * counts.rounds
    if draft == "itself":
        assert counts.accepted_tokens >= len(received) - counts.rounds


@pytest.mark.parametrize("draft", DRAFTS)
@settings(deadline=None, max_examples=8, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_turns_that_go_on_from_one_another_stay_right_for_both_models(
    draft: str, data: st.DataObject
) -> None:
    """Cancelled anywhere; what is stored of each model is what it forwarded, and is used again."""
    driver = driver_of(
        draft_tokens=data.draw(st.integers(1, 4)), ram=data.draw(st.sampled_from([60_000, 1 << 26]))
    )
    said: list[list[int]] = [[]]
    for _ in range(data.draw(st.integers(1, 6))):
        before = data.draw(st.sampled_from(said))
        own = data.draw(st.lists(st.integers(10, 250), min_size=1, max_size=40))
        prompt = [*before[: data.draw(st.integers(0, len(before)))], *own]
        name = data.draw(st.sampled_from([draft, draft, ""]))
        request = Request(tokens=prompt, max_tokens=data.draw(st.integers(1, 20)), draft=name)
        row = driver.joined(request)
        received = tokens_of(driver.decode(data.draw(st.sampled_from([0, 1, 6, 100]))))
        assert_greedy(model_of("itself"), prompt, received)
        driver.lane.keep(row)
        driver.check_idle()
        said.append([*prompt, *received])


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 9])
def test_rejected_tokens_are_not_stored_and_forwarded_ones_are(draft: str, max_tokens: int) -> None:
    """The model holds all but its own last token, the draft at most one fewer."""
    driver = driver_of()
    request = Request(tokens=PROMPT[:50], max_tokens=max_tokens, draft=draft)
    row = driver.joined(request)
    received = tokens_of(driver.decode())
    whole = [*request.tokens, *received]
    kept = driver.lane.computed(row)
    assert kept.tolist() == whole[: len(kept)]
    assert len(whole) - 1 <= len(kept) <= len(whole)
    draft_kv = row.draft
    assert driver.lane.keep(row) == len(kept)
    row.draft = draft_kv
    held = held_by_draft(driver, request, row, received)
    if draft != "itself":
        assert len(kept) - 1 <= held <= len(kept)
    assert driver.cache.peek_prefix_len([*whole, 1, 2], row.namespace) == len(kept)
    again = driver.opened(Request(tokens=[*whole, 11, 12], max_tokens=7, draft=draft))
    assert again.position == len(kept)
    assert again.draft is not None
    assert again.draft.position == held
    assert again.leases == 2
    assert_greedy(model_of("itself"), again.prompt.tolist(), tokens_of(driver.finish(again)))
    driver.lane.keep(again)
    driver.check_idle()


def test_a_round_s_tokens_come_together() -> None:
    driver = driver_of(draft_tokens=4)
    row = driver.joined(Request(tokens=PROMPT[:30], max_tokens=13, draft="itself"))
    sizes = []
    while driver.lane.running:
        sizes.append(len(driver.lane.step()))
    assert [size for size in sizes if size] == [5, 5, 3]
    driver.lane.keep(row)
    driver.check_idle()


def test_the_draft_model_computes_a_long_prompt_a_piece_a_step() -> None:
    """Others get their turn in between; the model itself needs no more than it lacks."""
    driver = driver_of()
    driver.run(Request(tokens=PROMPT, max_tokens=1))
    row = driver.joined(Request(tokens=PROMPT, max_tokens=4, draft="half"))
    assert row.ram_tokens == len(PROMPT) - 1
    assert row.draft is not None
    steps = [driver.lane.step() for _ in range(3)]
    assert steps == [[], [], []]
    assert row.draft.position == len(PROMPT) - 1 > 2 * DRAFT_PIECE
    assert tokens_of(driver.decode()) == alone(model_of("itself"), PROMPT, 4).tokens
    driver.lane.keep(row)
    driver.check_idle()


@pytest.mark.parametrize("end", ["keep", "discard"])
@pytest.mark.parametrize("state", ["opened", "prefilling", "joined", "catching up", "decoding"])
def test_a_row_with_a_draft_can_end_in_every_state(state: str, end: str) -> None:
    driver = driver_of()
    driver.run(Request(tokens=PROMPT[:100], max_tokens=1, draft="half"))
    row = driver.opened(Request(tokens=PROMPT, max_tokens=30, draft="half"))
    assert row.leases == driver.cache.statistics().leases == 2
    if state == "prefilling":
        driver.lane.prefill(row, 132)
    elif state != "opened":
        driver.prefill(row)
        driver.lane.join(row)
    if state == "catching up":
        assert driver.lane.step() == []
    draft, received = row.draft, driver.decode(4) if state == "decoding" else []
    driver.lane.check_integrity()
    kept = driver.end(row, end)
    driver.check_idle()
    assert row.leases == 0
    row.draft = draft
    tokens = tokens_of(received)
    held = held_by_draft(driver, Request(tokens=PROMPT), row, tokens)
    if end == "discard":
        assert held == 100
    elif state == "decoding":
        assert kept - 1 <= held <= kept
    else:
        assert held == (100 + DRAFT_PIECE if state == "catching up" else 100)
    after = [*PROMPT, *tokens, 9]
    again = driver.run(Request(tokens=after, max_tokens=5, draft="half"))
    assert tokens_of(again) == alone(model_of("itself"), after, 5).tokens


@pytest.mark.parametrize("victim", ["model", "draft"])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 7])
def test_either_model_raising_ends_that_row_alone(victim: str, at: int) -> None:
    main, half = model_of("itself"), model_of("half")
    failing = {"model": Failing(main.model), "draft": Failing(half.model)}
    model = with_model(main, failing["model"])
    driver = SerialDriver(model, {"half": with_model(half, failing["draft"])})
    request = Request(tokens=PROMPT[:97], max_tokens=30, draft="half")
    row = driver.opened(request)
    failing[victim].fails_at = at
    with pytest.raises(RuntimeError, match="on purpose"):
        driver.finish(row)
    assert not driver.lane.running
    driver.lane.reset()
    driver.lane.discard(row)
    driver.check_idle()
    assert driver.cache.total_bytes == 0
    assert tokens_of(driver.run(request)) == alone(main, PROMPT[:97], 30).tokens


def test_rows_without_the_cache_leave_nothing_of_either_model() -> None:
    driver = driver_of()
    driver.run(Request(tokens=PROMPT[:60], max_tokens=9, draft="half", cache=False))
    assert driver.cache.total_bytes == 0


def test_windows_can_be_trimmed_as_long_as_they_have_let_go_of_nothing() -> None:
    kind = f"synthetic:gemma3_text?layers=2&{SIZES}&seed=3&window=64"
    model = model_of(kind)
    driver = SerialDriver(model, {"half": model_of("half")})
    for turn in range(2):
        prompt = [*PROMPT[:40], *range(50, 50 + turn)]
        request = Request(tokens=prompt, max_tokens=20, draft="half")
        assert tokens_of(driver.run(request)) == alone(model, prompt, 20).tokens
    message = "keeps the last 64 tokens .* may come to 64"
    with pytest.raises(InvalidRequest, match=message):
        driver.row(Request(tokens=PROMPT[:40], max_tokens=24, draft="half"))


@pytest.mark.parametrize("kind", ["chunks", "copies"])
def test_chunks_can_be_trimmed_and_copies_of_what_is_stored(kind: str) -> None:
    """What is computed on keys and values themselves gets copies of the prefix."""
    copied = "synthetic:deepseek_v3?layers=2&hidden=64&context=512&dtype=float32"
    model = llama4() if kind == "chunks" else model_of(copied)
    driver = SerialDriver(model, {"itself": model})
    assert driver.batch.row_caches.self_test.passed == (kind == "chunks")
    asked, kept = [token % 120 for token in PROMPT[:33]], 0
    for _ in range(3):
        row = driver.opened(Request(tokens=asked, max_tokens=20, draft="itself"))
        assert row.position == kept
        received = tokens_of(driver.finish(row))
        assert_greedy(model, asked, received)
        kept = driver.lane.keep(row)
        driver.check_idle()
        asked = [*asked, *received, 3, 4]
    assert driver.lane.statistics().accepted_tokens > 20


def test_the_memory_of_a_draft_is_known() -> None:
    driver = driver_of()
    asked = Request(tokens=PROMPT[:100], max_tokens=156, draft="half")
    row = driver.joined(asked)
    driver.decode(1)
    assert row.draft is not None
    assert driver.lane.draft_bytes(row) == sum(cache.nbytes for cache in row.draft.caches)
    driver.lane.discard(row)
    assert driver.lane.draft_bytes(driver.row(Request(tokens=[5]))) == 0


REFUSED = {
    "small": (f"{DRAFTS['half']}&vocab=300", r"\(300 tokens\) has another vocabulary .*259 tokens"),
    "state": ("synthetic:mamba2?layers=1&hidden=64&context=2048", "ArraysCache of synthetic:mamba"),
    "short": ("synthetic:llama?layers=1&hidden=64&context=100", "context of the draft .*, 100"),
}


@pytest.mark.parametrize("name", [*REFUSED, "other"])
def test_a_draft_that_cannot_serve_is_refused_with_names_and_sizes(name: str) -> None:
    models = {each: model_of(spec) for each, (spec, _) in REFUSED.items()}
    driver = SerialDriver(model_of("itself"), models)
    message = REFUSED[name][1] if name in REFUSED else "'other' is loaded .*: 'small', 'state'"
    with pytest.raises(InvalidRequest, match=message) as caught:
        driver.row(Request(tokens=PROMPT[:95], max_tokens=9, draft=name))
    assert isinstance(caught.value, ContextOverflow) == (name == "short")


def test_a_draft_with_another_tokenizer_of_that_size_is_refused() -> None:
    model = model_of("itself")
    other = with_model(model_of("half"), model_of("half").model)
    other.identity = msgspec.structs.replace(other.identity, tokenizer="another")
    with pytest.raises(InvalidRequest, match="has another tokenizer"):
        SerialDriver(model, {"other": other}).row(Request(tokens=[5], draft="other"))


def test_a_draft_that_is_gone_when_its_turn_comes_ends_the_request_alone() -> None:
    drafts = {"half": model_of("half")}
    driver = SerialDriver(model_of("itself"), drafts)
    row = driver.row(Request(tokens=PROMPT[:30], draft="half"))
    del drafts["half"]
    with pytest.raises(EngineFailed, match="'half' is not loaded any more"):
        driver.lane.open(row)
    driver.lane.discard(row)
    driver.check_idle()


@pytest.mark.parametrize("draft_tokens", [0, -1, 17])
def test_how_many_tokens_are_drafted_has_a_range(draft_tokens: int) -> None:
    with pytest.raises(InvalidSetting, match=rf"draft_tokens is {draft_tokens}; .* \[1, 16\]"):
        driver_of(draft_tokens=draft_tokens)
