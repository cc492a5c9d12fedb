"""Grammars in a batch: outputs that they accept, and the tokens of mlx-lm alone for everybody."""

import json
import random
import re
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from

from mlx_swarm.broker import EngineFailed, Grammar, InvalidRequest, Request, Sampling
from mlx_swarm.broker.engine import decode_batch, grammar
from mlx_swarm.broker.engine.admission import special_tokens_of, vocabulary_of
from mlx_swarm.broker.engine.grammar import Grammars, choose_by_grammar, masked
from mlx_swarm.broker.engine.sampling import sample
from mlx_swarm.broker.models import LoadedModel
from tests.engine.driver import Box, Driver
from tests.engine.test_logprobs import model_of
from tests.engine.test_sampling_in_a_batch import SETTINGS, alone, replaced
from tests.tiny_broker import SHARED, prompt

SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "kind": {"enum": ["a", "bé"]}},
    "required": ["on", "kind"],
    "additionalProperties": False,
}
CALL = r"""
start: <|im_start|> "call " name "(" %json {"type": "integer", "minimum": 1, "maximum": 99} ")"
name: "f" | "go"
"""
GRAMMARS = (
    Grammar(choice=["yes", "yesterday", "nö 😀", 'a "b"\\']),
    Grammar(regex="[0-9]{3}(-[ab]+)?"),
    Grammar(json_schema=SCHEMA),
    Grammar(lark=CALL),
)


def matcher_of(model: LoadedModel, asked: Grammar) -> LLMatcher:
    """A matcher of llguidance's own for a model."""
    tokenizer = LLTokenizer(
        model.tokenizer_json(),
        n_vocab=max(vocabulary_of(model), len(model.tokenizer)),
        eos_token=list(special_tokens_of(model).ends),
    )
    source = asked.source()
    return LLMatcher(tokenizer, grammar_from(source.form, source.text), log_level=0)


def constrained(model: LoadedModel, request: Request) -> list[int]:
    """The tokens of mlx-lm alone with llguidance beside it."""
    assert request.grammar is not None
    matcher, tokens = matcher_of(model, request.grammar), list[int]()

    def process(context: mx.array, logits: mx.array) -> mx.array:
        new: Any = context[len(request.tokens) + len(tokens) :].tolist()
        for token in new:
            if not matcher.is_stopped():
                tokens.append(token)
                assert matcher.consume_token(token)
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        return mx.where(mx.array(bits[: logits.shape[-1]] == 1), logits, -mx.inf)

    generated = alone(model, request, process)
    return tokens if matcher.is_stopped() else generated


def check_accepted(model: LoadedModel, request: Request, box: Box) -> None:
    """Assert that an output is what its grammar wants, or the beginning of that if it was cut."""
    assert request.grammar is not None
    assert box.end is not None, box.error
    matcher, tokens = matcher_of(model, request.grammar), box.tokens
    text = box.end.text
    if tokens[-1] in special_tokens_of(model).ends:
        tokens = tokens[:-1]
        assert box.end.finish_reason == "stop"
    assert matcher.consume_tokens(tokens)
    if box.end.finish_reason != "stop":
        assert len(tokens) == request.max_tokens
        return
    assert matcher.is_accepting()
    if request.grammar.choice is not None:
        assert text in request.grammar.choice
    if request.grammar.regex is not None:
        assert re.fullmatch(request.grammar.regex, text)
    if request.grammar.json_schema is not None:
        found = json.loads(text)
        assert list(found) == ["on", "kind"]
        assert found["kind"] in ("a", "bé")
    if request.grammar.lark is not None:
        assert re.fullmatch(r"<\|im_start\|>call (f|go)\([1-9][0-9]?\)", text)


def mixed(count: int, chance: random.Random) -> list[Request]:
    """Requests of every setting, two of three with a grammar."""
    return [
        Request(
            tokens=prompt(number % 5, own=chance.randint(1, 6)),
            max_tokens=chance.randint(1, 40),
            sampling=replaced(unrestrained(SETTINGS[number % len(SETTINGS)]), number),
            grammar=None if number % 3 == 0 else GRAMMARS[number % len(GRAMMARS)],
            boundaries=(len(SHARED),),
            logprobs=chance.random() < 0.3,
        )
        for number in range(count)
    ]


def unrestrained(sampling: Sampling) -> Sampling:
    """The same without `min_tokens`, which has a grammar's ends to itself."""
    return Sampling(temperature=1.0) if sampling.min_tokens else sampling


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_rows_with_and_without_a_grammar_get_the_tokens_of_mlx_lm_alone(kind: str) -> None:
    """They join and leave at different times, with every setting beside the grammar."""
    model, chance = model_of(kind), random.Random(11)
    requests = mixed(24, chance)
    driver = Driver(model, max_rows=6)
    driver.stagger(requests, lambda: chance.randint(0, 4))
    reasons = set()
    for request, box in zip(requests, driver.boxes, strict=True):
        assert box.end is not None, box.error
        if request.grammar is None:
            assert box.tokens == alone(model, request)
        else:
            check_accepted(model, request, box)
            assert box.tokens == constrained(model, request)
            reasons.add(box.end.finish_reason)
        assert len(box.logprobs) == (len(box.tokens) if request.logprobs else 0)
    assert reasons == {"stop", "length"}
    driver.check_idle()
    driver.engine.close()


def test_a_complete_output_ends_at_once_also_at_its_last_token() -> None:
    """The last token's text is given out; no token is spent on an end."""
    driver = Driver(model_of("llama"))
    for max_tokens in (3, 4, 9):
        asked = Request(tokens=prompt(0), max_tokens=max_tokens, grammar=Grammar(choice=["abc"]))
        box = driver.submit(asked)
        driver.run()
        assert box.end is not None
        assert (box.end.text, box.end.finish_reason, len(box.tokens)) == ("abc", "stop", 3)
    driver.engine.close()


def test_what_was_generated_is_stored_for_the_next_turn() -> None:
    driver = Driver(model_of("llama"))
    asked = Request(tokens=prompt(0), max_tokens=9, grammar=Grammar(choice=["abc"]))
    box = driver.submit(asked)
    driver.run()
    history = [*asked.tokens, *box.tokens]
    following = driver.submit(Request(tokens=[*history, 5], max_tokens=1))
    driver.run()
    assert following.end is not None
    assert following.end.usage.cached_tokens == len(history)
    driver.engine.close()


def test_a_grammar_may_end_where_it_might_go_on_but_not_before_min_tokens() -> None:
    driver = Driver(model_of("llama"))
    wants_to_end = Sampling(logit_bias={2: 100.0})
    patient = Sampling(logit_bias={2: 100.0}, min_tokens=4)
    for sampling, length in ((wants_to_end, 1), (patient, 4)):
        asked = Request(
            tokens=prompt(0), max_tokens=9, sampling=sampling, grammar=Grammar(regex="[ab]+")
        )
        box = driver.submit(asked)
        driver.run()
        assert box.end is not None
        assert box.tokens[-1] == 2
        assert re.fullmatch(f"[ab]{{{length}}}", box.end.text)
    short = Grammar(regex="a{0,2}")
    box = driver.submit(Request(tokens=prompt(0), max_tokens=9, sampling=patient, grammar=short))
    driver.run()
    assert box.end is not None
    assert (box.end.text, box.end.finish_reason) == ("aa", "stop")
    driver.engine.close()


def test_stop_strings_still_end_a_row_with_a_grammar() -> None:
    driver = Driver(model_of("llama"))
    asked = Request(tokens=prompt(0), max_tokens=20, stop=["c"], grammar=Grammar(choice=["abcde"]))
    box = driver.submit(asked)
    driver.run()
    assert box.end is not None
    assert (box.end.text, box.end.finish_reason) == ("ab", "stop")
    driver.check_idle()
    driver.engine.close()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Grammar(regex="(a"), "the regex is not a grammar: .*unclosed group"),
        (Grammar(regex="a(?=b)"), "the regex is not a grammar: .*look-ahead"),
        (Grammar(regex=r"[^\x00-\U0010ffff]"), "the regex is not a grammar: .+"),
        (Grammar(lark="start: nothing"), 'the lark is not a grammar: .*unknown name: "nothing"'),
        (Grammar(lark=""), "the lark is not a grammar: Empty grammar"),
        (Grammar(json_schema={"type": "nope"}), "the json_schema is not .*Invalid type: nope"),
        (Grammar(json_schema='{"type":'), "json_schema is not JSON: .*column 9"),
        (
            Grammar(json_schema={"type": "integer", "minimum": 5, "maximum": 3}),
            r"minimum \(5\) is greater than maximum \(3\)",
        ),
    ],
)
def test_a_bad_grammar_is_refused_at_admission(bad: Grammar, message: str) -> None:
    driver = Driver(model_of("llama"))
    for _ in range(2):
        box = driver.submit(Request(tokens=prompt(0), grammar=bad))
        assert isinstance(box.error, InvalidRequest)
        assert re.search(message, str(box.error))
        assert "\n" not in str(box.error)
        assert len(str(box.error)) < 300
    driver.check_idle()
    driver.engine.close()


def test_a_tokenizer_that_llguidance_cannot_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    driver = Driver(model)
    for broken in (AttributeError("no backend_tokenizer"), ValueError("no vocabulary")):
        reason = Mock(side_effect=broken)
        with monkeypatch.context() as patch:
            patch.setattr(LoadedModel, "tokenizer_json", reason)
            box = driver.submit(Request(tokens=prompt(0), grammar=Grammar(regex="a")))
        assert isinstance(box.error, InvalidRequest)
        assert f"the tokenizer of {model.name} cannot serve a grammar: {broken}" in str(box.error)
    box = driver.submit(Request(tokens=prompt(0), grammar=Grammar(regex="a")))
    driver.run()
    assert box.end is not None
    assert box.end.text == "a"
    driver.engine.close()


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)])
@pytest.mark.parametrize("blanks", ["\n", " ", "\t", "\n ", "\r\n"])
def test_json_is_complete_although_the_model_likes_nothing_better_than_white_space(
    schema: Any, blanks: str
) -> None:
    model = model_of("llama")
    bias = {token: 100.0 for blank in blanks for token in model.encode(blank)}
    driver = Driver(model)
    asked = Grammar(json_schema=schema)
    box = driver.submit(
        Request(tokens=prompt(0), max_tokens=480, grammar=asked, sampling=Sampling(logit_bias=bias))
    )
    driver.run()
    assert box.end is not None, box.error
    assert box.end.finish_reason == "stop"
    assert list(json.loads(box.end.text)) == ["on", "kind"]
    assert any(blank in box.end.text for blank in blanks)
    plain = Grammar(json_schema={**SCHEMA, "x-guidance": {"whitespace_flexible": False}})
    box = driver.submit(Request(tokens=prompt(0), max_tokens=80, grammar=plain))
    driver.run()
    assert box.end is not None, box.error
    assert re.fullmatch(r"\S+", box.end.text)


def test_a_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def counted(form: str, text: str) -> str:
        compiled.append(text)
        return grammar_from(form, text)  # type: ignore[arg-type]

    monkeypatch.setattr(grammar, "grammar_from", counted)
    monkeypatch.setattr(grammar, "KEPT_GRAMMARS", 2)
    model = model_of("llama")
    grammars = Grammars(model, vocabulary_of(model), special_tokens_of(model).ends)
    for text in ("a", "b", "a", "c", "a", "b"):
        grammars.start(Grammar(regex=text))
    assert compiled == ["a", "b", "c", "b"]


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_a_grammar_that_cannot_go_on_ends_its_row_alone(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(kind)
    driver = Driver(model)
    asked = [
        Request(tokens=prompt(row), max_tokens=9, grammar=each)
        for row, each in enumerate([Grammar(regex="[ab]{8}"), None, Grammar(regex="[ab]{8}")])
    ]
    boxes = [driver.submit(request) for request in asked]
    driver.decode_all(boxes, 2)
    state = next(row for row in driver.engine.lane.running if row.request is asked[0]).grammar
    assert state is not None
    state.matcher.consume_token(7)
    driver.run()
    assert isinstance(boxes[0].error, EngineFailed)
    assert "the grammar could not be followed" in str(boxes[0].error)
    assert boxes[1].tokens == alone(model, asked[1])
    check_accepted(model, asked[2], boxes[2])
    driver.check_idle()
    driver.engine.close()


def test_cancelled_and_failed_steps_leave_nothing_of_a_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(model_of("llama"))
    asked = Request(tokens=prompt(0), max_tokens=30, grammar=Grammar(regex="[ab]{30}"))
    box = driver.submit(asked)
    driver.decode_all([box], 3)
    driver.cancel(0)
    driver.run()
    assert box.end is not None
    assert box.end.finish_reason == "cancelled"
    second = driver.submit(asked)
    driver.decode_all([second], 3)

    def broken(*_: Any) -> mx.array:
        raise ValueError("no mask")

    with monkeypatch.context() as patch:
        patch.setattr(decode_batch, "choose_by_grammar", broken)
        driver.run()
    assert isinstance(second.error, EngineFailed)
    third = driver.submit(asked)
    driver.run()
    check_accepted(model_of("llama"), asked, third)
    driver.check_idle()
    driver.engine.close()


def test_the_next_step_is_dispatched_before_masks_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows without a grammar have chosen by then; a step without one has a single dispatch."""
    order: list[str] = []

    def sampled(logits: mx.array, samplers: Sequence[Any]) -> mx.array:
        order.append("dispatch")
        return sample(logits, samplers)

    def chosen(*arguments: Any) -> mx.array:
        order.append("choose")
        return choose_by_grammar(*arguments)

    monkeypatch.setattr(decode_batch, "sample", sampled)
    monkeypatch.setattr(decode_batch, "choose_by_grammar", chosen)
    driver = Driver(model_of("llama"))
    driver.submit(Request(tokens=prompt(0), max_tokens=2))
    driver.run()
    assert order == ["dispatch"] * 3
    order.clear()
    driver.submit(Request(tokens=prompt(0), max_tokens=2, grammar=Grammar(choice=["abc"])))
    driver.run()
    assert order == ["dispatch", "choose"] * 3
    driver.engine.close()


def test_tokens_that_only_the_model_has_are_never_allowed() -> None:
    model = model_of("llama")
    grammars = Grammars(model, vocabulary_of(model), special_tokens_of(model).ends)
    logits = mx.zeros((1, vocabulary_of(model) + 100), mx.bfloat16)
    found = np.array(masked(logits, [grammars.start(Grammar(regex="a|b"))]).astype(mx.float32))[0]
    allowed = model.tokenizer.encode("ab", add_special_tokens=False)
    assert np.flatnonzero(np.isfinite(found)).tolist() == sorted(allowed)
