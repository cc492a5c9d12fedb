"""Rendering: boundaries that hold for every conversation, and templates that refuse."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_swarm.broker.errors import InvalidRequest
from mlx_swarm.broker.models import LoadedModel, Rendered, load
from mlx_swarm.broker.models.boundaries import common_prefix
from mlx_swarm.broker.request import Message

SYSTEM = Message("system", "You are brief.\n")
# The tokenizer of the embedded model merges across what a byte-level one keeps apart.
MODEL = load("synthetic:llama?layers=1&hidden=16&heads=1&tokenizer=smollm2-135m")


def conversation(*texts: str) -> list[Message]:
    roles = ("user", "assistant")
    return [SYSTEM, *(Message(roles[index % 2], text) for index, text in enumerate(texts))]  # type: ignore[arg-type]


@given(st.lists(st.text(), min_size=1, max_size=3))
def test_the_boundary_is_shared_by_every_conversation(texts: list[str]) -> None:
    [boundary] = MODEL.render(conversation("Hello")).boundaries
    rendered = MODEL.render(conversation(*texts))
    assert rendered.boundaries == (boundary,)
    assert rendered.tokens[:boundary] == MODEL.render(conversation("Hello")).tokens[:boundary]


def test_the_boundary_covers_the_instructions() -> None:
    rendered = MODEL.render(conversation("Hello"))
    shared = MODEL.tokenizer.decode(rendered.tokens[: rendered.boundaries[0]])
    assert shared.startswith("<|im_start|>system\nYou are brief.\n<|im_end|>\n")
    assert "Hello" not in shared


def test_another_system_message_has_another_boundary() -> None:
    longer = [Message("system", "You are brief. " * 20), Message("user", "Hello")]
    assert MODEL.render(longer).boundaries > MODEL.render(conversation("Hello")).boundaries


def test_without_a_system_message_there_is_no_boundary() -> None:
    assert MODEL.render([Message("user", "Hello")]).boundaries == ()


def test_the_generation_prompt_can_be_left_out() -> None:
    with_prompt = MODEL.render(conversation("Hello")).tokens
    without = MODEL.render(conversation("Hello"), add_generation_prompt=False).tokens
    assert with_prompt[: len(without)] == without
    assert MODEL.tokenizer.decode(with_prompt[len(without) :]) == "<|im_start|>assistant\n"


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 49_151)), max_size=40))
def test_sequences_that_are_read_side_by_side_have_only_their_own_text(
    tokens: list[tuple[int, int]],
) -> None:
    """Some end in the middle of a character, and a further one begins after them."""
    streams = [MODEL.new_detokenizer() for _ in range(3)]
    texts = ["", "", ""]
    for index, token in tokens:
        streams[index].add_token(token)
        texts[index] += streams[index].last_segment
    for index, text in enumerate(texts):
        alone = MODEL.new_detokenizer()
        assert (alone.tokens, alone.text) == ([], "")
        for token in [token for owner, token in tokens if owner == index]:
            alone.add_token(token)
        assert alone.text == text


def test_a_template_that_refuses_the_system_role_says_so() -> None:
    model = load("synthetic:llama?layers=1&hidden=16&heads=1")
    model.tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    )
    assert model.render([Message("user", "Hello")]).tokens
    with pytest.raises(InvalidRequest, match=r"system, user: Temp.*: no sys") as error:
        model.render(conversation("Hello"))
    assert "\n" not in str(error.value)


def test_a_template_that_refuses_some_texts_still_has_a_boundary() -> None:
    model = load("synthetic:llama?layers=1&hidden=16&heads=1")
    model.tokenizer.chat_template = (
        "{% for message in messages %}{% if not message['content'] %}"
        "{{ raise_exception('empty') }}{% endif %}{{ message['content'] }}|{% endfor %}"
    )
    rendered = model.render(conversation("Hello"))
    assert model.tokenizer.decode(rendered.tokens[: rendered.boundaries[0]]) == "You are brief.\n|"


def test_encode_adds_a_first_token_once() -> None:
    model = load("synthetic:llama?layers=1&hidden=16&heads=1")
    assert model.encode("ab") == model.tokenizer.encode("ab")
    assert model.encode("") == []
    assert model.encode("<|im_start|>a")[0] == 1


def test_threads_may_render_side_by_side() -> None:
    expected = MODEL.render(conversation("Hello"))
    found: list[Rendered] = []

    def work() -> None:
        found.extend(MODEL.render(conversation("Hello")) for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 20


def test_kept_prefixes_are_bounded() -> None:
    model = load("synthetic:llama?layers=1&hidden=16&heads=1")
    for index in range(300):
        model.render([Message("system", f"Agent {index}"), Message("user", "Hello")])
    assert len(model.chat._boundaries._kept) == 256


def test_common_prefix() -> None:
    assert common_prefix([[1, 2, 3], [1, 2], [1, 2, 4]]) == [1, 2]
    assert common_prefix([[1], [2]]) == []


def test_a_loaded_model_is_what_the_engine_expects() -> None:
    assert isinstance(MODEL, LoadedModel)
    assert len(MODEL.make_caches()) == 1
