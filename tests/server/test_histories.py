"""Conversations that come again as messages: their very tokens, and never another text."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from mlx_swarm.broker import InvalidRequest, Message, Tool, ToolCall, Usage
from mlx_swarm.broker.models import load
from mlx_swarm.broker.models.chat_format import ChatFormat
from mlx_swarm.broker.server.turns.histories import Histories, Prompt
from mlx_swarm.broker.server.turns.turn import Call, Caller, Conversation, Ended

SMOLLM2 = "synthetic:llama?layers=1&hidden=32&heads=2&tokenizer=smollm2-135m"
BYTES = "synthetic:llama?layers=1&hidden=32&heads=2"
NOBODY = Caller()
WEATHER = Tool("weather", "Tells the weather.", {"type": "object", "properties": {}})

WORDS = ("the", "cat", " sat", "é", "€", "🙂", "\ufffd", "\n", "  ", "<|im_end|>", "1234", "x")
texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=8).map("".join)


@pytest.fixture(scope="module", params=[SMOLLM2, BYTES])
def chat(request: pytest.FixtureRequest) -> ChatFormat:
    return load(request.param).chat


@pytest.fixture(scope="module")
def smollm2() -> ChatFormat:
    return load(SMOLLM2).chat


def encoded(chat: ChatFormat, text: str, places: Sequence[int] = ()) -> list[int]:
    """A text as a model may write it: in the tokens of its pieces."""
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    with chat._tokenizing:
        pieces = [
            chat._tokenizer.encode(text[a:b], add_special_tokens=False) for a, b in pairwise(ends)
        ]
    return [token for piece in pieces for token in piece]


def ended(tokens: Sequence[int], text: str, calls: Sequence[Call] = ()) -> Ended:
    return Ended(
        finish_reason="stop",
        text=text,
        reasoning="",
        calls=tuple(calls),
        usage=Usage(),
        ttft_seconds=0.0,
        stop_sequence=None,
        prompt=(),
        tokens=tuple(tokens),
    )


class Dialogue:
    """Turns of one conversation, whose replies are made up."""

    def __init__(self, chat: ChatFormat, histories: Histories | None = None, **fields: object):
        self.chat = chat
        self.histories = histories or Histories()
        self.fields = fields
        self.messages: list[Message] = [Message("system", "Be brief.")]

    def prompt(self, caller: Caller = NOBODY) -> Prompt:
        prompt = self.histories.prompt(self.chat, "", self.conversation, caller)
        check(self.chat, prompt, self.conversation)
        return prompt

    @property
    def conversation(self) -> Conversation:
        return Conversation(messages=tuple(self.messages), **self.fields)  # type: ignore[arg-type]

    def say(
        self,
        text: str,
        reply: Sequence[int],
        said: str | None = None,
        calls: Sequence[Call] = (),
    ) -> list[int]:
        """A turn to which the model replied with these tokens, of which the client got `said`;
        the tokens that its history has.
        """
        self.messages.append(Message("user", text))
        prompt = self.histories.join(self.prompt())
        got = self.chat.decode(reply).removesuffix("<|im_end|>") if said is None else said
        self.histories.keep(prompt, "", self.conversation, ended(reply, got, calls))
        self.histories.leave(prompt)
        sent = tuple(ToolCall(call.id, call.name, call.arguments) for call in calls)
        self.messages.append(Message("assistant", got, tool_calls=sent))
        self.histories.check_integrity()
        return [*prompt.tokens, *reply]


def check(chat: ChatFormat, prompt: Prompt, conversation: Conversation) -> None:
    """Assert that the model sees what the template made of the conversation."""
    rendered = chat.render(conversation.messages, conversation.tools)
    assert chat.decode(prompt.tokens) == chat.decode(rendered.tokens) == rendered.text
    assert prompt.text == rendered.text
    assert all(0 <= boundary <= len(prompt.tokens) for boundary in prompt.boundaries)
    assert list(prompt.boundaries) == sorted(set(prompt.boundaries))
    for boundary in rendered.boundaries[:1]:
        assert boundary in prompt.boundaries


def agreed(prompt: Prompt, history: Sequence[int]) -> int:
    """How many tokens a prompt has in common with a history."""
    pairs = zip(prompt.tokens, history, strict=False)
    return next(
        (at for at, (a, b) in enumerate(pairs) if a != b), min(len(history), len(prompt.tokens))
    )


turns = st.tuples(
    texts,
    texts,
    st.lists(st.integers(0, 40), max_size=4),
    st.sampled_from(["end", "length", "stop", "halves", "trimmed"]),
)
edits = st.tuples(st.integers(0, 9), st.sampled_from(["", "text", "gone", "twice", "cut"]), texts)


@settings(max_examples=60, deadline=None)
@given(said=st.lists(turns, min_size=1, max_size=4), edit=edits)
def test_no_history_changes_what_the_model_sees(
    chat: ChatFormat,
    said: list[tuple[str, str, list[int], str]],
    edit: tuple[int, str, str],
) -> None:
    dialogue = Dialogue(chat)
    for question, answer, cuts, finish in said:
        reply, got = encoded(chat, answer, cuts), answer
        match finish:
            case "end":
                reply = [*reply, *encoded(chat, "<|im_end|>")]
            case "stop":
                reply = [*reply, *encoded(chat, "STOP and on")]
            case "halves":
                reply, got = [*reply, *encoded(chat, "€")[:1]], f"{answer}\ufffd"
            case "trimmed":
                reply = [*reply, *encoded(chat, "\n\n<|im_end|>")]
        dialogue.say(question, reply, got)
    at, kind, text = edit
    messages = dialogue.messages
    at = 1 + at % (len(messages) - 1)
    match kind:
        case "text":
            messages[at] = replace(messages[at], content=text)
        case "gone":
            del messages[at]
        case "twice":
            messages.insert(at, messages[at])
        case "cut":
            del messages[at + 1 :]
    messages.append(Message("user", text))
    dialogue.prompt()


@pytest.mark.parametrize("end", ["<|im_end|>", ""])
def test_the_next_turns_go_on_from_the_last_token(chat: ChatFormat, end: str) -> None:
    dialogue = Dialogue(chat)
    for number in range(3):
        reply = encoded(chat, f"hello wörld {number}{end}", [3, 7])
        history = dialogue.say(f"question {number}", reply)
        dialogue.messages.append(Message("user", "and then?"))
        prompt = dialogue.prompt()
        dialogue.messages.pop()
        assert agreed(prompt, history) == len(history)
        assert len(history) in prompt.boundaries
        assert prompt.history
    assert dialogue.histories.statistics().continued == 5


def test_a_stop_string_costs_what_comes_after_it_and_no_more(smollm2: ChatFormat) -> None:
    dialogue = Dialogue(smollm2)
    beginning, beyond = encoded(smollm2, "one two", [2]), encoded(smollm2, " three four")
    history = dialogue.say("count", [*beginning, *beyond], "one two")
    dialogue.messages.append(Message("user", "go on"))
    assert agreed(dialogue.prompt(), history) == len(history) - len(beyond)


def test_white_space_that_a_client_trims_costs_itself(smollm2: ChatFormat) -> None:
    dialogue = Dialogue(smollm2)
    reply = [*encoded(smollm2, "one two", [5]), *encoded(smollm2, "\n\n"), *encoded(smollm2, "\n")]
    history = dialogue.say("count", reply, "one two\n\n\n")
    dialogue.messages[-1] = Message("assistant", "one two")
    dialogue.messages.append(Message("user", "go on"))
    assert agreed(dialogue.prompt(), history) == len(history) - 2


def test_half_a_character_at_the_end_is_kept(chat: ChatFormat) -> None:
    dialogue = Dialogue(chat)
    half = encoded(chat, "🙂")[:1]
    history = dialogue.say("smile", [*encoded(chat, "so: "), *half], "so: \ufffd")
    dialogue.messages.append(Message("user", "go on"))
    assert agreed(dialogue.prompt(), history) == len(history)


def test_forks_share_a_history(smollm2: ChatFormat) -> None:
    dialogue = Dialogue(smollm2)
    history = dialogue.say("hello", encoded(smollm2, "helloworld<|im_end|>", [2, 4]))
    for text in ("left", "right"):
        dialogue.messages.append(Message("user", text))
        assert agreed(dialogue.prompt(), history) == len(history)
        dialogue.messages.pop()


def test_after_an_edit_the_history_before_it_counts(smollm2: ChatFormat) -> None:
    dialogue = Dialogue(smollm2)
    first = dialogue.say("hello", encoded(smollm2, "helloworld<|im_end|>", [2, 4]))
    dialogue.say("more", encoded(smollm2, "something<|im_end|>", [3]))
    dialogue.messages[3] = Message("user", "less")
    dialogue.messages[4] = Message("assistant", "nothing")
    dialogue.messages.append(Message("user", "so?"))
    assert agreed(dialogue.prompt(), first) == len(first)


def test_calls_are_known_by_name_and_arguments(smollm2: ChatFormat) -> None:
    dialogue = Dialogue(smollm2, tools=(WEATHER,))
    dialogue.messages.append(Message("user", "Rain?"))
    prompt = dialogue.prompt()
    call = ToolCall("call_1", "weather", '{"b": 2, "a": 1}')
    said = [*dialogue.messages, Message("assistant", "", tool_calls=(call,))]
    rendered = smollm2.render(said, (WEATHER,), add_generation_prompt=False)
    reply = encoded(smollm2, rendered.text.removeprefix(prompt.text).rstrip("\n"), [5, 9, 11])
    done = ended(reply, "", [Call("call_1", "weather", call.arguments)])
    dialogue.histories.keep(prompt, "", dialogue.conversation, done)
    again = ToolCall("call_2", "weather", call.arguments)
    dialogue.messages += [
        Message("assistant", "", tool_calls=(again,), reasoning="It may rain."),
        Message("tool", "dry", tool_call_id="call_2"),
    ]
    history = [*prompt.tokens, *reply]
    assert agreed(dialogue.prompt(), history) == len(history)
    other = ToolCall("call_2", "weather", '{"a": 1, "b": 3}')
    dialogue.messages[2] = replace(dialogue.messages[2], tool_calls=(other,))
    assert not dialogue.prompt().history


def test_a_reply_that_comes_as_two_messages_is_known(smollm2: ChatFormat) -> None:
    dialogue = Dialogue(smollm2, tools=(WEATHER,))
    call = Call("call_1", "weather", "{}")
    dialogue.say("Rain?", encoded(smollm2, "Let me see."), "Let me see.", [call])
    whole = dialogue.messages.pop()
    calls = whole.tool_calls
    dialogue.messages += [replace(whole, tool_calls=()), Message("assistant", tool_calls=calls)]
    dialogue.messages.append(Message("tool", "dry", tool_call_id="call_1"))
    assert dialogue.prompt().history


def test_tenants_tools_and_models_have_their_own(smollm2: ChatFormat) -> None:
    dialogue = Dialogue(smollm2)
    dialogue.say("hello", encoded(smollm2, "helloworld<|im_end|>", [2, 4]))
    dialogue.messages.append(Message("user", "go on"))
    assert dialogue.prompt().history
    assert not dialogue.prompt(Caller(tenant="other")).history
    other = Dialogue(smollm2, dialogue.histories, tools=(WEATHER,))
    other.messages = dialogue.messages
    assert not other.prompt().history
    model = Dialogue(load(SMOLLM2).chat, dialogue.histories)
    model.messages = dialogue.messages
    assert not model.prompt().history


def test_what_cannot_be_rendered_is_refused(smollm2: ChatFormat) -> None:
    call = ToolCall("1", "weather", "not JSON")
    broken = Conversation(messages=(Message("assistant", tool_calls=(call,)),))
    with pytest.raises(InvalidRequest):
        Histories().prompt(smollm2, "", broken, NOBODY)


def test_memory_is_bounded_and_the_longest_unused_goes_first(smollm2: ChatFormat) -> None:
    histories = Histories(4000)
    dialogues = []
    for number in range(8):
        dialogue = Dialogue(smollm2, histories)
        dialogue.say(f"hello {number}", encoded(smollm2, "good morning<|im_end|>"))
        dialogue.messages.append(Message("user", "go on"))
        dialogues.append(dialogue)
        dialogues[0].prompt()
    known = [bool(each.prompt().history) for each in dialogues]
    assert known[0]
    assert known[-1]
    assert not known[1]
    assert histories.statistics().bytes <= 4000


def test_nothing_is_kept_of_what_is_larger_than_all(smollm2: ChatFormat) -> None:
    dialogue = Dialogue(smollm2, Histories(10))
    dialogue.say("hello", encoded(smollm2, "hi<|im_end|>"))
    assert dialogue.histories.statistics().entries == 0


class TestLineage:
    """Whose a turn is that names no agent."""

    @pytest.fixture
    def dialogue(self, smollm2: ChatFormat) -> Dialogue:
        dialogue = Dialogue(smollm2)
        dialogue.say("hello", encoded(smollm2, "hi<|im_end|>"))
        return dialogue

    def joined(self, dialogue: Dialogue, text: str, caller: Caller = NOBODY) -> Prompt:
        dialogue.messages.append(Message("user", text))
        prompt = dialogue.histories.join(dialogue.prompt(caller))
        dialogue.messages.pop()
        return prompt

    def agent(self, dialogue: Dialogue, text: str, caller: Caller = NOBODY) -> str:
        prompt = self.joined(dialogue, text, caller)
        dialogue.histories.leave(prompt)
        return prompt.caller.agent

    def test_a_turn_belongs_to_who_had_the_one_before(self, dialogue: Dialogue) -> None:
        agent = self.agent(dialogue, "one")
        assert agent
        dialogue.say("one", encoded(dialogue.chat, "two<|im_end|>"))
        assert self.agent(dialogue, "three") == agent

    def test_new_conversations_have_agents_of_their_own(self, smollm2: ChatFormat) -> None:
        dialogue = Dialogue(smollm2)
        assert self.agent(dialogue, "a") != self.agent(dialogue, "a")

    def test_a_fork_is_somebody_else(self, dialogue: Dialogue) -> None:
        first = self.agent(dialogue, "one")
        assert self.agent(dialogue, "two") != first
        assert self.agent(dialogue, "one") == first

    def test_the_same_turn_at_once_is_somebody_else(self, dialogue: Dialogue) -> None:
        running = self.joined(dialogue, "one")
        assert self.agent(dialogue, "one") != running.caller.agent
        dialogue.histories.leave(running)
        assert self.agent(dialogue, "one") == running.caller.agent

    def test_a_name_that_is_given_counts(self, dialogue: Dialogue) -> None:
        assert self.agent(dialogue, "one", Caller(agent="bob")) == "bob"
