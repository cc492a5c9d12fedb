"""Transcripts on a real tokenizer and its chat template."""

from collections.abc import Sequence

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_swarm.agents.transcript import Transcript
from mlx_swarm.broker.models import LoadedModel, load
from mlx_swarm.broker.request import Message
from tests.agents.fake_broker import FakeBroker
from tests.agents.fake_broker import Rendered as FakeRendered

CONVERSATION = [("What is 2 + 2?", "It is 4."), ("And 3 + 3?", "6\n\n"), ("Danke schön! 🎉", "…")]


class TokenizerBroker(FakeBroker):
    """Renders as a real model does."""

    def __init__(self, model: LoadedModel) -> None:
        super().__init__()
        self._model = model

    async def render(self, messages: Sequence[Message], *, model: str = "") -> FakeRendered:
        rendered = self._model.render(messages)
        return FakeRendered(rendered.tokens, rendered.boundaries)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load("synthetic:llama?layers=1&hidden=32&heads=2&tokenizer=smollm2-135m")


def end_of_turn(model: LoadedModel) -> int:
    (token,) = model.encode("<|im_end|>")
    return token


def converse(
    model: LoadedModel, instructions: str, turns: list[tuple[str, str]], ended: bool
) -> tuple[list[int], list[int]]:
    """The transcript's tokens after some turns, and those of the conversation rendered at once."""
    transcript, broker = Transcript(instructions), TokenizerBroker(model)

    async def take_turns() -> list[int]:
        for text, reply in turns:
            prompt = await transcript.prompt(broker, text)
            assert prompt.tokens[: len(transcript.tokens)] == transcript.tokens
            generated = model.encode(reply) + [end_of_turn(model)] * ended
            transcript.append(prompt, text, reply, generated)
        return list((await transcript.prompt(broker, "Bye.")).tokens)

    grown = anyio.run(take_turns)
    return grown, model.render([*transcript.messages, Message("user", "Bye.")]).tokens


@pytest.mark.parametrize("instructions", ["", "You are terse."])
@pytest.mark.parametrize("ended", [True, False])
def test_grown_tokens_equal_the_rendered_conversation(
    model: LoadedModel, instructions: str, ended: bool
) -> None:
    grown, rendered = converse(model, instructions, CONVERSATION, ended)
    assert grown == rendered


words = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
# Blanks at the start of a reply merge with the template's line end: the tokenizer joins what the
# model said apart, which is why generated ids are kept.
replies = words.filter(lambda text: not text[0].isspace())


@settings(max_examples=30, deadline=None)
@given(turns=st.lists(st.tuples(words, replies), max_size=3))
def test_any_text_grows_as_it_is_rendered(model: LoadedModel, turns: list[tuple[str, str]]) -> None:
    grown, rendered = converse(model, "You are terse.", turns, ended=True)
    assert grown == rendered
