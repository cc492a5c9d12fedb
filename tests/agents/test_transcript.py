"""Transcripts: whatever the chat template is, a turn's tokens begin the next turn's prompt."""

from collections.abc import Callable, Sequence

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_swarm.agents.transcript import Transcript
from mlx_swarm.broker.errors import InvalidRequest
from mlx_swarm.broker.request import Message
from tests.agents.fake_broker import END, FakeBroker, Rendered, characters

pytestmark = pytest.mark.anyio

Template = Callable[[Sequence[Message]], str]


class TemplateBroker(FakeBroker):
    """Renders with a template over characters; the character ¶ stands for the end token."""

    def __init__(self, template: Template) -> None:
        super().__init__()
        self.template = template

    async def render(self, messages: Sequence[Message], *, model: str = "") -> Rendered:
        return Rendered(tokens_of(self.template(messages)), ())


def tokens_of(text: str) -> list[int]:
    pieces = [characters(piece) for piece in text.split("¶")]
    return pieces[0] + [token for piece in pieces[1:] for token in (END, *piece)]


def plain(messages: Sequence[Message]) -> str:
    """No marks but words and line ends."""
    turns = "".join(f"{message.role}: {message.content}\n" for message in messages)
    return turns + "assistant: "


def marked(messages: Sequence[Message]) -> str:
    """A preamble when there are no instructions; an end token and a line end after each turn."""
    preamble = "" if messages[0].role == "system" else "<system>be helpful¶\n"
    turns = "".join(f"<{message.role}>{message.content}¶\n" for message in messages)
    return f"{preamble}{turns}<assistant>"


def forgetful(messages: Sequence[Message]) -> str:
    """Puts the instructions into the last user turn, and thoughts before the latest reply only."""
    text = ""
    for number, message in enumerate(messages):
        latest = number >= len(messages) - 2
        match message.role:
            case "user" if latest and messages[0].role == "system":
                text += f"[{messages[0].content}|{message.content}]"
            case "user":
                text += f"[{message.content}]"
            case "assistant":
                text += f"{'<think></think>' if latest else ''}{message.content}¶"
    return f"{text}<think>"


@pytest.mark.parametrize(
    ("template", "generated", "addition"),
    [
        (marked, "hello¶", "\n<user>more¶\n<assistant>"),
        (marked, "cut off he", "¶\n<user>more¶\n<assistant>"),
        (plain, "hello", "\nuser: more\nassistant: "),
        (plain, "hello\nuser: ", "more\nassistant: "),
        (forgetful, "thought</think>hello¶", "[more]<think>"),
    ],
)
async def test_a_turn_goes_on_where_the_reply_ended(
    template: Template, generated: str, addition: str
) -> None:
    broker, transcript = TemplateBroker(template), Transcript("Be brief.")
    first = await transcript.prompt(broker, "hi")
    transcript.append(first, "hi", "hello", tokens_of(generated))
    second = await transcript.prompt(broker, "more")
    assert list(second.tokens) == [*first.tokens, *tokens_of(generated), *tokens_of(addition)]


async def test_asking_for_a_prompt_changes_nothing() -> None:
    broker, transcript = TemplateBroker(marked), Transcript()
    assert await transcript.prompt(broker, "hi") == await transcript.prompt(broker, "hi")
    assert (transcript.tokens, transcript.messages) == ((), ())


async def test_a_template_that_drops_replies_is_refused_at_the_second_turn() -> None:
    def last_only(messages: Sequence[Message]) -> str:
        return messages[-1].content

    broker, transcript = TemplateBroker(last_only), Transcript()
    transcript.append(await transcript.prompt(broker, "hi"), "hi", "hello", tokens_of("hello"))
    with pytest.raises(InvalidRequest, match="leaves replies out"):
        await transcript.prompt(broker, "more")


async def test_boundaries_stay_those_of_the_instructions() -> None:
    broker, transcript = FakeBroker(), Transcript("Be brief.")
    for text in ("one", "two", "three"):
        prompt = await transcript.prompt(broker, text)
        assert prompt.boundaries == (len("Be brief.") + 2,)
        transcript.append(prompt, text, "ok", [*characters("ok"), END])


@given(turns=st.lists(st.tuples(st.text("abA B", min_size=1), st.text("abA B")), max_size=5))
def test_replies_that_end_properly_give_the_template_of_the_whole_conversation(
    turns: list[tuple[str, str]],
) -> None:
    async def converse() -> None:
        broker, transcript = TemplateBroker(marked), Transcript("Be brief.")
        messages = [Message("system", "Be brief.")]
        for text, reply in turns:
            prompt = await transcript.prompt(broker, text)
            messages.append(Message("user", text))
            assert list(prompt.tokens) == tokens_of(marked(messages))
            transcript.append(prompt, text, reply, tokens_of(f"{reply}¶"))
            messages.append(Message("assistant", reply))
        assert list(transcript.messages) == messages

    anyio.run(converse)
