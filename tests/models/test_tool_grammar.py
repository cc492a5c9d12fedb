"""Grammars of tool calls: what they let through is what the parsers read."""

import json
import random
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from

from mlx_swarm.broker import Grammar, NamedTool, Tool, ToolChoice
from mlx_swarm.broker.models import CallPiece, LoadedModel, load
from mlx_swarm.broker.models.marker import Marker
from mlx_swarm.broker.models.reply_reader import ReplyReader, marks_of
from mlx_swarm.broker.models.tool_grammar import tool_grammar
from mlx_swarm.broker.models.tool_syntax import ThinkTags
from mlx_swarm.broker.models.turns import template_tools
from tests.models.call_examples import ARGUMENTS, EXAMPLES, FAMILIES, WEATHER, Example, syntax_of

TINY = "synthetic:llama?layers=1&hidden=16&heads=1"
ANY = Tool("any-thing", "Takes all.")
TOOLS = [WEATHER, ANY]
CLOSED = Tool(
    "get_weather",
    "",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Oslo", "Rome"]},
            "days": {"type": "integer", "minimum": 0, "maximum": 99},
            "wind": {"type": "boolean"},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
)
THINK = ThinkTags("<think>", "</think>")
SPELT = load(f"{TINY}&tokenizer=smollm2-135m")
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}</tool_call>'


@cache
def tokenizer_of(model: LoadedModel) -> LLTokenizer:
    size = len(model.tokenizer)
    return LLTokenizer(model.tokenizer_json(), n_vocab=size, eos_token=[2])


@cache
def with_tokens(*marks: str) -> LoadedModel:
    """A model whose tokenizer has each mark as a token of its own."""
    model = load(TINY)
    model.tokenizer.add_tokens(list(marks), special_tokens=True)
    return model


def marks_in(family: str) -> list[str]:
    syntax = syntax_of(family)
    inner = {
        "mistral": ["[ARGS]"],
        "kimi_k2": ["<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"],
        "kimi_k3": ["<|open|>", "<|close|>", "<|sep|>"],
        "gemma4": ['<|"|>'],
        "function_gemma": ["<escape>"],
        "glm47": ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    }
    outer = [] if family == "kimi_k3" else [syntax.start, syntax.end]
    return [mark for mark in [*outer, *inner.get(family, []), "<think>", "</think>"] if mark]


def matcher(model: LoadedModel, grammar: Grammar | None) -> LLMatcher:
    assert grammar is not None
    grammar.validate()
    found = LLMatcher(tokenizer_of(model), grammar_from(*grammar.source()), log_level=0)
    assert not found.is_error(), found.get_error()
    found.compute_bitmask()
    assert not found.is_error(), found.get_error()
    return found


def allows(model: LoadedModel, grammar: Grammar | None, text: str) -> bool:
    """Whether a grammar lets a text be the whole output."""
    found = matcher(model, grammar)
    tokens = model.tokenizer.encode(text, add_special_tokens=False)
    return found.try_consume_tokens(tokens) == len(tokens) and bool(found.is_accepting())


def grammar_of(
    model: LoadedModel,
    family: str = "json_tools",
    choice: ToolChoice = "required",
    *,
    tools: Sequence[Tool] = (WEATHER, ANY),
    think: ThinkTags | None = None,
    **settings: Any,
) -> Grammar | None:
    given = {"parallel": True, "schema": None, "in_reasoning": False, **settings}
    marker = Marker(model.tokenizer)
    return tool_grammar(syntax_of(family), marker, tools, choice, think=think, **given)


@pytest.mark.parametrize("example", EXAMPLES, ids=FAMILIES)
@pytest.mark.parametrize("is_token", [False, True])
def test_calls_in_the_syntax_of_each_parser_are_let_through(
    example: Example, is_token: bool
) -> None:
    syntax = syntax_of(example.family)
    model = with_tokens(*marks_in(example.family)) if is_token else SPELT
    call = f"{syntax.start}{example.body}{syntax.end}"
    wrong = call.replace("get_weather", "get_whether")
    for choice in ("required", NamedTool("get_weather")):
        grammar = grammar_of(model, example.family, choice)
        assert allows(model, grammar, call)
        assert not allows(model, grammar, f"Hm. {call}")
        assert not allows(model, grammar, wrong)
    assert not allows(model, grammar_of(model, example.family, NamedTool("any-thing")), call)
    auto = grammar_of(model, example.family, "auto")
    for text in ("", "Hm, <b>no</b>.", call, f"Hm.\n{call}"):
        assert allows(model, auto, text)
    assert allows(model, auto, f"{call}\nDone.\n{call}") == bool(syntax.end)
    assert not allows(model, auto, wrong)
    assert not allows(model, auto, f"Hm.\n{wrong}")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_grammar_compiles(family: str) -> None:
    choices: tuple[ToolChoice, ...] = ("auto", "required", NamedTool("any-thing"))
    settings = product(choices, (True, False), (None, {"type": "object"}), (None, THINK))
    for choice, parallel, schema, think in settings:
        given: dict[str, Any] = {"parallel": parallel, "schema": schema, "think": think}
        matcher(SPELT, grammar_of(SPELT, family, choice, in_reasoning=bool(think), **given))


@pytest.mark.parametrize(
    "family", [each for each in FAMILIES if each not in ("gemma4", "function_gemma")]
)
def test_whatever_comes_out_is_a_call_that_the_parser_reads(family: str) -> None:
    """Random walks through what the grammar allows, where no text is free."""
    syntax, draw = syntax_of(family), random.Random(family)
    model = with_tokens("<think>", "</think>")
    found = matcher(model, grammar_of(model, family, tools=[CLOSED], parallel=False))
    text = ""
    while not found.is_accepting():
        mask = found.compute_logit_bias()
        token = draw.choice([token for token in range(3, len(mask)) if mask[token]])
        assert found.consume_token(token)
        text += model.tokenizer.decode([token])
    reading = ReplyReader(marks_of(syntax, None), syntax, template_tools([CLOSED]))
    [piece] = [*reading.feed(text), *reading.finish()]
    assert isinstance(piece, CallPiece)
    assert piece.name == "get_weather"
    assert set(json.loads(piece.arguments)) >= set(ARGUMENTS)


def test_arguments_keep_to_their_schema() -> None:
    grammar = grammar_of(SPELT)
    assert allows(SPELT, grammar, CALL)
    assert not allows(SPELT, grammar, CALL.replace("2", '"two"'))
    assert not allows(SPELT, grammar, CALL.replace(', "days": 2', ""))
    assert not allows(SPELT, grammar, CALL.replace("2}", '2, "more": 1}'))
    assert allows(SPELT, grammar, CALL.replace("2}", '2, "unit": "C"}'))
    assert not allows(SPELT, grammar, CALL.replace("2}", '2, "unit": "K"}'))


def test_definitions_of_a_schema_are_found() -> None:
    schema = {
        "type": "object",
        "$defs": {"City": {"type": "string", "enum": ["Oslo"]}},
        "properties": {"city": {"$ref": "#/$defs/City"}},
        "required": ["city"],
    }
    for family, call in (
        ("json_tools", '<tool_call>{"name": "f", "arguments": {"city": "Oslo"}}</tool_call>'),
        ("pythonic", '<|tool_call_start|>[f(city="Oslo")]<|tool_call_end|>'),
    ):
        grammar = grammar_of(SPELT, family, tools=[Tool("f", "", schema)])
        assert allows(SPELT, grammar, call)
        assert not allows(SPELT, grammar, call.replace("Oslo", "Rome"))


def test_keywords_that_no_grammar_knows_are_passed_over() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "format": "odd"}}}
    model = SPELT
    grammar = model.chat.grammar(
        [Tool("f", "", {**odd, "unevaluatedProperties": False})], "required"
    )
    assert allows(model, grammar, '<tool_call>{"name": "f", "arguments": {"a": "b"}}</tool_call>')


@pytest.mark.parametrize("odd", [{"pattern": "^(?=x)y"}, {"$ref": "#/nowhere"}])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_schema_that_no_grammar_can_follow_leaves_its_tool_free(
    choice: ToolChoice, odd: dict[str, Any]
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", **odd}}}
    grammar = SPELT.chat.grammar([Tool("f", "", schema), CLOSED], choice)
    assert allows(SPELT, grammar, '<tool_call>{"name": "f", "arguments": {"a": "b"}}</tool_call>')
    assert allows(SPELT, grammar, CALL)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_without_parallel_there_is_one_call_at_most(choice: ToolChoice) -> None:
    for parallel in (True, False):
        grammar = grammar_of(SPELT, choice=choice, parallel=parallel)
        assert allows(SPELT, grammar, CALL)
        assert allows(SPELT, grammar, f"{CALL}\n{CALL}") == parallel


def test_what_is_no_call_keeps_to_the_schema_of_the_answer() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    grammar = grammar_of(SPELT, choice="auto", schema=schema)
    assert allows(SPELT, grammar, '{"a": 1}')
    assert allows(SPELT, grammar, CALL)
    assert not allows(SPELT, grammar, '{"a": "b"}')
    assert not allows(SPELT, grammar, "Hm.")
    assert SPELT.chat.grammar(TOOLS, "none", schema=schema) == Grammar(json_schema=schema)


@pytest.mark.parametrize("is_token", [False, True])
def test_reasoning_stays_free(is_token: bool) -> None:
    model = with_tokens(*marks_in("json_tools")) if is_token else SPELT
    grammar = grammar_of(model, think=THINK)
    assert allows(model, grammar, f"<think>\nHm, {{.\n</think>\n\n{CALL}")
    assert allows(model, grammar, CALL)
    assert not allows(model, grammar, f"Hm, {{.\n</think>\n\n{CALL}")
    begun = grammar_of(model, think=THINK, in_reasoning=True)
    assert allows(model, begun, f"Hm, {{.\n</think>\n\n{CALL}")
    assert not allows(model, begun, CALL)
    answer = grammar_of(model, choice="none", think=THINK, schema={"type": "integer"})
    assert allows(model, answer, "<think>Hm.</think>\n12")
    assert not allows(model, answer, "<think>Hm.</think>\nHm.")


def test_without_a_reason_there_is_no_grammar() -> None:
    assert SPELT.chat.grammar(TOOLS, "none") is None
    assert SPELT.chat.grammar([], "auto") is None


def test_the_mark_of_a_call_can_be_banned_if_it_is_a_token() -> None:
    model = with_tokens("<tool_call>", "</tool_call>")
    assert model.chat.banned_tokens() == (model.tokenizer.convert_tokens_to_ids("<tool_call>"),)
    assert SPELT.chat.banned_tokens() == ()
