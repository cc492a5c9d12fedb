"""Conversations on the templates of well-known families: everything is told, at its place."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_swarm.broker import ContextOverflow, InvalidRequest, Message, Tool, ToolCall
from mlx_swarm.broker.models import CallPiece, LoadedModel, ReasoningPiece, TextPiece, load
from mlx_swarm.broker.models.boundaries import _common_text
from tests.models.call_examples import WEATHER, syntax_of
from tests.models.templates import (
    ALTERNATING,
    BRACKETS,
    CHATML_TOOLS,
    DATED,
    HOISTING,
    TINY,
    with_template,
)

CALL = ToolCall("call_1", "get_weather", '{"city": "Oslo"}')
OTHER = ToolCall("call_2", "get_weather", '{"city": "Rome"}')
WORKED = [
    Message("system", "Be brief."),
    Message("user", "Weather?"),
    Message("assistant", "", (CALL, OTHER)),
    Message("tool", "rain", tool_call_id="call_1", name="get_weather"),
    Message("tool", "sun", tool_call_id="call_2", name="get_weather"),
    Message("user", "Thanks."),
]
MODELS = {
    "chatml": with_template(CHATML_TOOLS, syntax_of("json_tools"), thinks=True),
    "alternating": with_template(ALTERNATING),
    "brackets": with_template(BRACKETS, syntax_of("mistral")),
    "dated": with_template(DATED, syntax_of("json_tools"), bos="<|begin|>"),
    "hoisting": with_template(HOISTING, thinks=True, bos="<bos>"),
    "generic": load(TINY),
    "embedded": load(f"{TINY}&tokenizer=smollm2-135m"),
}
every_model = pytest.mark.parametrize("name", list(MODELS))


def text_of(
    name: str, messages: Sequence[Message], tools: Sequence[Tool] = (), prompt: bool = True
) -> str:
    return MODELS[name].chat.render(messages, tools, add_generation_prompt=prompt).text


def in_order(text: str, *words: str) -> bool:
    places = [text.find(word) for word in words]
    return places == sorted(places) and -1 not in places


@every_model
def test_half_a_character_in_the_arguments_of_a_call_is_told(name: str) -> None:
    call = ToolCall(
        "call_1", "get_weather", r'{"city": "a\ud83d", "\udc4b": "\ud83d\udc4b", "n": 1e999}'
    )
    rendered = MODELS[name].chat.render(
        [*WORKED[:2], Message("assistant", "", (call,)), *WORKED[3:4], WORKED[5]], [WEATHER]
    )
    assert rendered.tokens
    assert "get_weather" in rendered.text


def test_a_text_that_is_certain_to_be_too_long_is_not_cut_into_tokens() -> None:
    chat = MODELS["generic"].chat
    assert chat.render([Message("user", "a" * 100)], most_tokens=256).tokens
    with pytest.raises(ContextOverflow, match=r"the prompt has 1,\d{3},\d{3} characters"):
        chat.render([Message("user", "a" * 1_000_000)], most_tokens=256)


@every_model
def test_tokens_are_those_of_the_template(name: str) -> None:
    tokenizer = MODELS[name].tokenizer
    messages = [Message("user", "Hi"), Message("assistant", "Hello"), Message("user", "Bye")]
    turns = [{"role": each.role, "content": each.content} for each in messages]
    rendered = MODELS[name].chat.render(messages)
    assert rendered.tokens == tokenizer.apply_chat_template(turns, add_generation_prompt=True)
    assert rendered.text == tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, tokenize=False
    )
    assert rendered.tokens == MODELS[name].render(messages).tokens


@every_model
def test_tools_calls_and_results_are_all_told(name: str) -> None:
    text = text_of(name, WORKED, [WEATHER])
    words = ["get_weather", "The weather of a city.", "maxLength"]
    assert all(word in text for word in words)
    assert "Be brief." in text
    assert in_order(text, "Weather?", "Oslo", "Rome") or in_order(text, "Weather?", "Oslo", "rain")
    assert in_order(text, "rain", "sun", "Thanks.")


@every_model
@pytest.mark.parametrize("role", ["system", "developer"])
def test_later_instructions_stay_at_their_place(name: str, role: str) -> None:
    talk = [
        Message("user", "one"),
        Message("assistant", "two"),
        Message(role, "three"),  # type: ignore[arg-type]
        Message("user", "four"),
        Message("assistant", "five"),
        Message("user", "six"),
    ]
    for start in ([], [Message("system", "zero"), Message("developer", "half")]):
        text = text_of(name, [*start, *talk])
        assert in_order(text, *(each.content for each in [*start, *talk]))
        assert "developer" not in text


def test_a_later_system_message_keeps_its_role_where_it_can() -> None:
    talk = [Message("user", "one"), Message("assistant", "two"), Message("system", "three")]
    assert "<|im_start|>system\nthree<|im_end|>" in text_of("chatml", talk)
    assert "<|head|>system<|/head|>\n\nthree<|eot|>" in text_of("dated", talk)
    assert "<|User|>three" in text_of("hoisting", talk)


def test_users_turns_are_joined_where_they_have_to_alternate() -> None:
    talk = [Message("user", "one"), Message("user", "two"), Message("assistant", "three")]
    assert "<start>user\none\n\ntwo<end>" in text_of("alternating", talk)
    assert text_of("chatml", talk).count("<|im_start|>user") == 2


def test_results_are_in_the_form_that_the_template_has() -> None:
    assert '"rain"<|eot|>' in text_of("dated", WORKED, [WEATHER])
    assert "<|im_start|>user\n<tool_response>\nrain\n</tool_response>" in text_of("chatml", WORKED)
    assert "<|im_start|>user\n<tool_response>\nrain\n</tool_response>" in text_of("generic", WORKED)
    assert "user\n<tool_response>\nrain\n</tool_response>\n\n" in text_of("alternating", WORKED)


def test_a_template_of_one_call_a_turn_has_each_with_its_result() -> None:
    assert in_order(text_of("dated", WORKED), "Oslo", "rain", "Rome", "sun", "Thanks.")


def test_ids_are_as_short_as_a_template_wants_them() -> None:
    text = text_of("brackets", WORKED, [WEATHER])
    [first, second] = [part.partition(":")[0] for part in text.split("[TOOL_RESULTS]")[1:]]
    assert len(first) == len(second) == 9
    assert first != second


def test_what_a_user_says_after_a_result_may_have_to_be_told_with_it() -> None:
    assert "sun\n\nThanks.[/TOOL_RESULTS]" in text_of("brackets", WORKED, [WEATHER])
    answered = [*WORKED[:-1], Message("assistant", "Mixed."), WORKED[-1]]
    text = text_of("brackets", answered, [WEATHER])
    assert "sun[/TOOL_RESULTS]Mixed.</s>" in text
    assert text.index("AVAILABLE") < text.index("[INST]Thanks.")


def test_calls_are_text_where_the_template_has_none() -> None:
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
    for name in ("generic", "alternating", "hoisting"):
        assert call in text_of(name, WORKED, [WEATHER])


def test_tools_are_told_to_a_template_without_a_system_message() -> None:
    text = text_of("generic", [Message("user", "Hi")], [WEATHER])
    assert text.startswith("<|im_start|>system\nYou can call the tools below.")
    assert json.dumps(WEATHER.parameters) in text


def test_reasoning_is_handed_on() -> None:
    thought = Message("assistant", "Yes.", reasoning="Hm, well.")
    asked = [Message("user", "So?"), thought]
    assert "<think>\nHm, well.\n</think>" in text_of("chatml", asked, prompt=False)
    assert "Hm" not in text_of("chatml", [*asked, Message("user", "And?")])


def test_thinking_can_be_turned_off() -> None:
    chat = MODELS["chatml"].chat
    messages = [Message("user", "Hi")]
    assert chat.render(messages, thinking=False).text.endswith("<think>\n\n</think>\n\n")
    assert chat.render(messages, thinking=True).text == chat.render(messages).text


def test_the_switch_of_thinking_may_have_another_name() -> None:
    model = with_template("{{ messages[0].content }}{% if thinking %}<think>{% endif %}")
    texts = [model.chat.render([Message("user", "Hi")], thinking=on).text for on in (True, False)]
    assert texts == ["Hi<think>", "Hi"]


def test_tools_are_told_in_the_form_that_the_reader_reads() -> None:
    """A template may show tools, in a form of which mlx-lm has no parser."""
    model = with_template(DATED)
    text = model.chat.render(WORKED, [WEATHER]).text
    assert "Functions:" not in text
    assert "You can call the tools below." in text
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>' in text


@every_model
@settings(max_examples=20)
@given(following=st.text(min_size=1).filter(str.strip))
def test_a_boundary_holds_for_whatever_follows(name: str, following: str) -> None:
    chat = MODELS[name].chat
    head = [
        Message("system", "Be brief."),
        Message("user", "one", is_boundary=True),
        Message("assistant", "two", is_boundary=True),
    ]
    rendered = chat.render([*head, Message("user", "three")], [WEATHER])
    assert list(rendered.boundaries) == sorted(set(rendered.boundaries))
    other = chat.render([*head, Message("user", following)], [WEATHER])
    assert other.boundaries == rendered.boundaries
    longest = rendered.boundaries[-1]
    assert other.tokens[:longest] == rendered.tokens[:longest]


def test_boundaries_are_at_the_ends_of_their_messages() -> None:
    model = MODELS["embedded"]
    messages = [
        Message("system", "Be brief."),
        Message("user", "one", is_boundary=True),
        Message("assistant", "two", is_boundary=True),
        Message("user", "three"),
    ]
    rendered = model.chat.render(messages)
    assert [model.decode(rendered.tokens[:end])[-24:] for end in rendered.boundaries] == [
        # A line break merges with one that follows.
        "Be brief.<|im_end|>\n<|im_start|>user"[-24:],
        "<|im_start|>user\none<|im_end|>\n<|im_start|>"[-24:],
        "assistant\ntwo<|im_end|>\n<|im_start|>user"[-24:],
    ]


@pytest.mark.parametrize("name", ["chatml", "generic"])
def test_tools_have_a_boundary_without_instructions(name: str) -> None:
    model = MODELS[name]
    rendered = model.chat.render([Message("user", "Hi")], [WEATHER])
    [boundary] = rendered.boundaries
    assert "get_weather" in model.decode(rendered.tokens[:boundary])
    assert model.chat.render([Message("user", "Hi")]).boundaries == ()


def test_a_reply_to_a_prompt_is_read() -> None:
    prompt = MODELS["hoisting"].chat.render([Message("user", "What is <think>?")], [WEATHER])
    reader = MODELS["hoisting"].chat.reader([WEATHER], prompt.text)
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
    pieces = [*reader.feed(f"Hm.</think>\nSee:\n{call}"), *reader.finish()]
    assert pieces == [
        ReasoningPiece("Hm."),
        TextPiece("See:"),
        CallPiece("get_weather", '{"city": "Oslo"}'),
    ]
    mentioned = MODELS["chatml"].chat.render([Message("user", "What is <think>?")])
    plain = MODELS["chatml"].chat.reader((), mentioned.text)
    assert [*plain.feed(call), *plain.finish()] == [TextPiece(call)]


def test_a_system_message_that_is_refused_says_so() -> None:
    model: LoadedModel = with_template(
        "{% for message in messages %}{% if message.role == 'system' %}"
        "{{ raise_exception('no system') }}{% endif %}{{ message.content }}{% endfor %}"
    )
    with pytest.raises(InvalidRequest, match="refuses the roles system, user"):
        model.chat.render([Message("system", "Be brief."), Message("user", "Hi")])
    assert "get_weather" in model.chat.render([Message("user", "Hi")], [WEATHER]).text


@given(st.lists(st.text("ab", max_size=9), min_size=1, max_size=4))
def test_the_text_that_all_begin_with(texts: list[str]) -> None:
    shared = _common_text(texts)
    assert all(text.startswith(shared) for text in texts)
    further = {text[len(shared) : len(shared) + 1] for text in texts}
    assert len(further) > 1 or further == {""}
