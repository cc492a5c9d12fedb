"""Chats over a real broker: the next turn computes what is new, and nothing else."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from mlx_swarm.broker import Broker, Grammar, Message, Sampling, Tool, ToolCall
from mlx_swarm.broker.server.turns.generation import Generation, Generator
from mlx_swarm.broker.server.turns.histories import Histories
from mlx_swarm.broker.server.turns.turn import Caller, Conversation, Ended, Turn
from mlx_swarm.broker.trace import events

pytestmark = pytest.mark.anyio

MODEL = (
    "synthetic:llama?layers=2&hidden=64&heads=4&kv_heads=2&intermediate=128&context=2048&seed=3"
    "&tokenizer=smollm2-135m"
)
CITIES = ["Rome", "Oslo"]
WEATHER = Tool(
    "weather",
    "Tells the weather.",
    {
        "type": "object",
        "properties": {"city": {"enum": CITIES}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
NOBODY = Caller()
WORDS = Grammar(regex="[A-Z][a-z]{1,8}( [a-z]{1,8}){3}\\.")
STRIPPING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and '</think>' in message['content'] %}"
    "{{ message['content'].split('</think>')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def broker() -> AsyncIterator[Broker]:
    async with Broker(MODEL, ram="64MiB") as broker:
        yield broker


@pytest.fixture
async def generator(broker: Broker) -> Generator:
    await broker.cache_view.clear()
    return Generator(broker, Histories())


class Chat:
    """A client that sends everything again with every turn."""

    def __init__(self, generator: Generator, tools: tuple[Tool, ...] = ()) -> None:
        self.generator = generator
        self.tools = tools
        self.messages: list[Message] = [Message("system", "You are a careful assistant.")]
        self.last: Generation | None = None

    async def turn(self, *messages: Message, caller: Caller = NOBODY, **fields: Any) -> Ended:
        self.messages += messages
        choice = fields.pop("choice", "auto")
        conversation = Conversation(messages=tuple(self.messages), tools=self.tools, choice=choice)
        settings: dict[str, Any] = {"max_tokens": 40, "sampling": Sampling(seed=len(self.messages))}
        asked = Turn(prompt=conversation, caller=caller, **{**settings, **fields})
        async with await self.generator.start(asked) as self.last:
            ended = await self.last.end()
        calls = tuple(ToolCall(each.id, each.name, each.arguments) for each in ended.calls)
        self.messages.append(Message("assistant", ended.text, tool_calls=calls))
        return ended

    @property
    def agent(self) -> str:
        assert self.last is not None
        return self.last.prompt.caller.agent


def computed(ended: Ended) -> int:
    """Tokens of the prompt that could have been cached and were not."""
    return ended.usage.prefilled_tokens


async def planned(generator: Generator) -> events.Planned:
    """Where the last prompt came from."""
    found = generator.broker.recorder.events()
    return [event for event in found if isinstance(event, events.Planned)][-1]


async def test_three_turns_compute_what_is_new(generator: Generator) -> None:
    chat = Chat(generator)
    said = await chat.turn(Message("user", "What is new?"), grammar=WORDS)
    assert said.finish_reason == "stop"
    for number in range(2):
        before = [*said.prompt, *said.tokens]
        said = await chat.turn(Message("user", f"And number {number}?"), grammar=WORDS)
        assert said.prompt[: len(before)] == tuple(before)
        assert said.usage.ram_tokens >= len(before) - 1
        assert said.usage.prefilled_tokens <= len(said.prompt) - len(before) + 1


async def test_a_reply_in_other_tokens_than_its_text_has(generator: Generator) -> None:
    chat = Chat(generator)
    letters = Grammar(regex="[a-z]{30}")
    said = await chat.turn(Message("user", "Go."), grammar=letters)
    own = await generator.broker.encode(said.text)
    assert list(said.tokens[: len(own)]) != own
    before = [*said.prompt, *said.tokens]
    said = await chat.turn(Message("user", "And?"), grammar=WORDS)
    assert said.usage.ram_tokens >= len(before) - 1


async def test_after_a_stop_string_the_hit_ends_before_it(generator: Generator) -> None:
    chat = Chat(generator)
    said = await chat.turn(Message("user", "Go."), grammar=WORDS, stop=(" ",))
    assert said.stop_sequence == " "
    assert said.text
    assert " " not in said.text
    again = await chat.turn(Message("user", "And?"), grammar=WORDS)
    kept = len(again.prompt) - again.usage.prefilled_tokens
    assert kept >= len(said.prompt)
    assert again.prompt[:kept] == (*said.prompt, *said.tokens)[:kept]
    rendered = await generator.broker.render(chat.messages[:-1])
    assert await generator.broker.decode(again.prompt) == rendered.text


async def test_a_stop_string_is_named_though_the_output_began_with_a_space(
    generator: Generator,
) -> None:
    """The text of an output leaves out the space that its first token begins with."""
    asked = Turn(
        prompt=(1, 2, 3), max_tokens=8, grammar=Grammar(regex=" [a-z]{3}[.]"), stop=("zz", ".")
    )
    async with await generator.start(asked) as generation:
        ended = await generation.end()
    assert (len(ended.text.strip()), ended.stop_sequence) == (3, ".")


async def test_calls_and_their_results_compute_what_is_new(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Generator, "_grammar", lambda self, turn, prompt: turn.grammar)
    called = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    calling = Grammar(choice=[called, called.replace("Rome", "Oslo")])
    chat = Chat(generator, (WEATHER,))
    said = await chat.turn(Message("user", "Rain?"), grammar=calling)
    for _ in range(2):
        assert said.finish_reason == "tool_calls"
        before = (*said.prompt, *said.tokens)
        results = [Message("tool", "dry", tool_call_id=call.id) for call in said.calls]
        said = await chat.turn(*results, grammar=calling)
        common = len(said.prompt) - said.usage.prefilled_tokens
        assert said.prompt[: len(before)] == before
        assert common >= len(before) - 1


async def test_calls_that_the_template_writes_otherwise_fall_back(generator: Generator) -> None:
    chat = Chat(generator, (WEATHER,))
    said = await chat.turn(Message("user", "Rain?"), choice="required", max_tokens=120)
    assert said.finish_reason == "tool_calls"
    results = [Message("tool", "dry", tool_call_id=call.id) for call in said.calls]
    again = await chat.turn(*results, choice="required", max_tokens=4)
    assert again.usage.ram_tokens >= len(said.prompt)
    rendered = await generator.broker.render(chat.messages[:-1], tools=chat.tools)
    assert await generator.broker.decode(again.prompt) == rendered.text


async def test_a_template_that_leaves_out_thoughts_falls_back(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    thinking = Grammar(regex="<think>[a-z]{3,9}</think>[A-Z][a-z]{3,9}")
    tokenizer: Any = generator.broker._known().named(generator.broker.model_name).tokenizer
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", STRIPPING)
    chat = Chat(generator)
    said = await chat.turn(Message("user", "Think."), grammar=thinking)
    assert said.text.startswith("<think>")
    again = await chat.turn(Message("user", "Again."), grammar=thinking)
    plan = await planned(generator)
    assert plan.reason == "diverged"
    assert plan.divergence is not None
    assert plan.divergence.index >= len(said.prompt)
    assert plan.divergence.stored == said.tokens[plan.divergence.index - len(said.prompt)]
    assert plan.divergence.wanted == again.prompt[plan.divergence.index]
    assert again.usage.ram_tokens >= len(said.prompt)


async def test_agents_follow_from_what_was_said(generator: Generator) -> None:
    first, second = Chat(generator), Chat(generator)
    recorder = generator.broker.recorder
    start = recorder.statistics().emitted
    await first.turn(Message("user", "One."), max_tokens=4)
    agent = first.agent
    await second.turn(Message("user", "Another one."), max_tokens=4)
    assert agent
    assert second.agent not in ("", agent)
    fork = Chat(generator)
    fork.messages = list(first.messages)
    await first.turn(Message("user", "Two."), max_tokens=4)
    assert first.agent == agent
    await fork.turn(Message("user", "Or three?"), max_tokens=4)
    assert fork.agent not in (agent, second.agent)
    await fork.turn(Message("user", "Four."), caller=Caller(agent="bob"), max_tokens=4)
    assert fork.agent == "bob"
    found = recorder.since(start).events
    queued = [each.agent for each in found if isinstance(each, events.Queued)]
    assert queued[0] == queued[2] == agent
    assert queued[-1] == "bob"


async def test_those_who_said_the_same_stay_two(generator: Generator) -> None:
    chats = [Chat(generator), Chat(generator)]
    for chat in chats:
        await chat.turn(Message("user", "One."), max_tokens=4)
    assert chats[0].messages == chats[1].messages
    agents = {chat.agent for chat in chats}
    for chat in chats:
        await chat.turn(Message("user", "Two."), max_tokens=4)
    assert {chat.agent for chat in chats} == agents
    assert len(agents) == 2


async def test_a_turn_that_is_abandoned_leaves_its_agent_free(generator: Generator) -> None:
    chat = Chat(generator)
    await chat.turn(Message("user", "One."), max_tokens=4)
    agent, conversation = chat.agent, (*chat.messages, Message("user", "Two."))
    asked = Turn(prompt=Conversation(messages=conversation), max_tokens=500)
    async with await generator.start(asked) as generation:
        async for _ in generation:
            break
    assert generation.prompt.caller.agent == agent
    await chat.turn(Message("user", "Two."), max_tokens=4)
    assert chat.agent == agent


async def test_a_plain_prompt_belongs_to_nobody(generator: Generator) -> None:
    async with await generator.start(Turn(prompt="Once upon", max_tokens=3)) as generation:
        await generation.end()
    assert generation.prompt.caller.agent == ""
    warm = Turn(prompt=Conversation(messages=(Message("user", "hi"),)), generate=False)
    async with await generator.start(warm) as generation:
        ended = await generation.end()
    assert ended.usage.output_tokens == 0
    assert generation.prompt.caller.agent == ""
