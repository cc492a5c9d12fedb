"""Replies as they come: cut anywhere, in every syntax, well-formed or not."""

import json
import pkgutil
from collections.abc import Sequence

import mlx_lm.tool_parsers
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_swarm.broker import Tool
from mlx_swarm.broker.models.reply_reader import (
    CallPiece,
    Piece,
    ReasoningPiece,
    ReplyReader,
    State,
    TextPiece,
    marks_of,
)
from mlx_swarm.broker.models.tool_syntax import GENERIC, ThinkTags, ToolSyntax
from mlx_swarm.broker.models.turns import template_tools
from tests.models.call_examples import ARGUMENTS, EXAMPLES, FAMILIES, WEATHER, Example, syntax_of

THINK = ThinkTags("<think>", "</think>")
TOOLS = (Tool("f"), Tool("g"))
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
CALLED = CallPiece("f", '{"a": 1}')
FRAGMENTS = (
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    '{"name": "f", "arguments": {}}',
    '{"name": "h", "arguments": {}}',
    CALL,
    "<",
    "<tool",
    "</",
    "\n",
    "  ",
    "word",
    "é🙂",
)
replies = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


def reader(
    syntax: ToolSyntax | None = GENERIC,
    tools: Sequence[Tool] = TOOLS,
    think: ThinkTags | None = THINK,
    start: State = "normal",
) -> ReplyReader:
    return ReplyReader(marks_of(syntax, think, start=start), syntax, template_tools(tools))


def read(parts: Sequence[str], reading: ReplyReader | None = None) -> list[Piece]:
    """The pieces of a reply that comes in parts, texts in a row as one."""
    reading = reading or reader()
    pieces: list[Piece] = []
    for piece in [*(each for part in parts for each in reading.feed(part)), *reading.finish()]:
        last = pieces[-1] if pieces else None
        if isinstance(piece, TextPiece) and isinstance(last, TextPiece):
            pieces[-1] = TextPiece(last.text + piece.text)
        elif isinstance(piece, ReasoningPiece) and isinstance(last, ReasoningPiece):
            pieces[-1] = ReasoningPiece(last.text + piece.text)
        else:
            pieces.append(piece)
    return pieces


def cut(reply: str, data: st.DataObject) -> list[str]:
    places = sorted(data.draw(st.lists(st.integers(0, len(reply)), max_size=8)))
    return [reply[a:b] for a, b in zip([0, *places], [*places, len(reply)], strict=True)]


@given(replies, st.sampled_from(["normal", "reasoning"]), st.data())
def test_a_reply_says_the_same_however_it_is_cut(
    reply: str, start: State, data: st.DataObject
) -> None:
    whole, parts = reader(start=start), reader(start=start)
    assert read([reply], whole) == read(cut(reply, data), parts)
    assert whole.malformed == parts.malformed


@given(replies, st.data())
def test_nothing_but_marks_and_white_space_is_lost(reply: str, data: st.DataObject) -> None:
    said = "".join(
        json.dumps({"name": piece.name, "arguments": json.loads(piece.arguments)})
        if isinstance(piece, CallPiece)
        else piece.text
        for piece in read(cut(reply, data))
    )
    for mark in ("<tool_call>", "</tool_call>", "<think>", "</think>"):
        reply, said = reply.replace(mark, ""), said.replace(mark, "")
    assert "".join(said.split()) == "".join(reply.split())


@given(st.text(st.sampled_from("<>/tool_cathink \n"), max_size=60), st.data())
def test_without_tools_and_reasoning_a_reply_is_its_text(reply: str, data: st.DataObject) -> None:
    plain = reader(None, (), None)
    assert read(cut(reply, data), plain) == ([TextPiece(reply)] if reply else [])


@given(st.text(st.sampled_from("<>/tool_cathink \n"), max_size=60))
def test_no_more_is_held_back_than_a_mark_and_the_space_before_it(reply: str) -> None:
    reading, shown = reader(think=None), 0
    for end in range(1, len(reply) + 1):
        shown += sum(
            len(piece.text)
            for piece in reading.feed(reply[end - 1])
            if isinstance(piece, TextPiece)
        )
        if "<tool_call>" in reply[:end]:
            return
        held = reply[shown:end]
        assert len(held.lstrip()) < len("<tool_call>")


def test_calls_stand_between_texts() -> None:
    assert read([f"Let me see.\n\n{CALL}\n{CALL}\nDone."]) == [
        TextPiece("Let me see."),
        CALLED,
        CALLED,
        TextPiece("Done."),
    ]


def test_reasoning_comes_before_the_answer() -> None:
    reply = f"<think>\nHm.\n\nYes.\n</think>\n\nSo:  yes.\n{CALL}"
    assert read([reply]) == [ReasoningPiece("Hm.\n\nYes."), TextPiece("So:  yes."), CALLED]


def test_a_prompt_may_have_begun_the_reasoning() -> None:
    assert read(["\nHm.\n</think>\n\nYes."], reader(start="reasoning")) == [
        ReasoningPiece("Hm."),
        TextPiece("Yes."),
    ]


def test_reasoning_that_says_nothing_is_none() -> None:
    assert read(["<think>\n\n</think>\n\nYes."]) == [TextPiece("Yes.")]


@pytest.mark.parametrize(
    "wrong",
    [
        '<tool_call>{"name": "f", "arguments": {</tool_call>',
        '<tool_call>{"name": "h", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "no JSON"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>["f"]</tool_call>',
        "<tool_call></tool_call>",
        "<tool_call>",
        '<tool_call>\n{"name": "f", "arguments": {}}\n',
    ],
)
def test_what_is_no_call_stays_as_the_model_wrote_it(wrong: str) -> None:
    reading = reader()
    assert read([f"Well:\n\n{wrong}"], reading) == [TextPiece(f"Well:\n\n{wrong}")]
    assert reading.malformed == 1


def test_a_call_after_a_wrong_one_is_read() -> None:
    reading = reader()
    assert read([f"<tool_call>{{</tool_call>\n{CALL}"], reading) == [
        TextPiece("<tool_call>{</tool_call>"),
        CALLED,
    ]
    assert reading.malformed == 1


@pytest.mark.parametrize(
    ("arguments", "read_as"),
    [('"{\\"a\\": 1}"', '{"a": 1}'), ("null", "{}"), ('{"é": "ü"}', '{"é": "ü"}')],
)
def test_arguments_come_as_the_json_of_an_object(arguments: str, read_as: str) -> None:
    call = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert read([call]) == [CallPiece("f", read_as)]


def test_without_tools_a_call_is_text() -> None:
    assert read([CALL], reader(None, ())) == [TextPiece(CALL)]


def test_the_examples_cover_every_parser() -> None:
    parsers = {module.name for module in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)}
    assert parsers <= set(FAMILIES)


@pytest.mark.parametrize("example", EXAMPLES, ids=FAMILIES)
def test_every_parser_of_mlx_lm_is_understood(example: Example) -> None:
    syntax = syntax_of(example.family)
    call = f"{syntax.start}{example.body}{syntax.end}"
    reading = reader(syntax, [WEATHER])
    [text, piece] = read(list(f"Hm.\n{call}\n"), reading)
    assert text == TextPiece("Hm.")
    assert isinstance(piece, CallPiece)
    assert (piece.name, json.loads(piece.arguments)) == ("get_weather", ARGUMENTS)
    assert reading.malformed == 0


def test_several_calls_may_share_their_marks() -> None:
    body = "[f(a=1), g(b=[true, None])]"
    syntax = syntax_of("pythonic")
    assert read([f"{syntax.start}{body}{syntax.end}"], reader(syntax)) == [
        CallPiece("f", '{"a": 1}'),
        CallPiece("g", '{"b": [true, null]}'),
    ]


def test_calls_to_the_end_of_the_output() -> None:
    text = '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}'
    assert read([text], reader(syntax_of("mistral"))) == [CALLED, CallPiece("g", "{}")]


def test_the_id_of_a_call_is_not_its_name() -> None:
    text = '[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{"a": 1}'
    assert read([text], reader(syntax_of("mistral"))) == [CALLED]


def test_a_header_says_what_follows() -> None:
    think = {
        "header": [("to=self<|message|>", "reasoning"), ("to=user<|message|>", "normal")],
        "reasoning": [("<|eom|>", "header")],
        "normal": [("<|eom|>", "header")],
    }
    marks = marks_of(None, None, start="header", extra=think)  # type: ignore[arg-type]
    reply = "to=self<|message|>Hm.<|eom|>assistant to=user<|message|>Yes."
    assert read(list(reply), ReplyReader(marks)) == [ReasoningPiece("Hm."), TextPiece("Yes.")]


def test_structure_between_texts_is_left_out() -> None:
    marks = marks_of(None, None, dropped=("<|open|>response<|sep|>", "<|close|>response<|sep|>"))
    reply = "<|open|>response<|sep|>Yes.<|close|>response<|sep|>"
    assert read(list(reply), ReplyReader(marks)) == [TextPiece("Yes.")]


def test_half_a_character_in_arguments_can_be_sent() -> None:
    arguments = '{"a": "\\ud83d", "\\udc4b": "\\ud83d\\udc4b"}'
    written = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert read([written]) == [CallPiece("f", '{"a": "\ufffd", "\ufffd": "\U0001f44b"}')]
