"""What one API call asks for, whichever API it came through, and what comes of it. No MLX."""

from typing import Literal, NamedTuple

from msgspec import Struct

from ...grammar import Grammar
from ...request import Message, Sampling, TokenLogprob, Tool, ToolChoice, Usage

FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]


class Caller(Struct, frozen=True, kw_only=True):
    """For whom a turn is computed: fairness, pins and the lanes of the trace go by it.

    `tenant` comes from the API key and separates caches. Without an `agent` the turn belongs to
    whoever had the longest beginning of its conversation before, if anybody.
    """

    tenant: str = ""
    swarm: str = ""
    agent: str = ""
    priority: int = 0


class Conversation(Struct, frozen=True, kw_only=True):
    """Messages for a chat template, and the tools that the reply may call.

    `begun` is text of the reply that is there already: it follows the generation prompt, in tokens
    of its own, and the reply goes on from it.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = "auto"
    parallel_calls: bool = True
    thinking: bool | None = None
    begun: str = ""


class Turn(Struct, frozen=True, kw_only=True):
    """One prompt to be continued: a conversation, a text, or tokens.

    `max_tokens` is cut to what the context has left; None is all of that. `grammar` holds for the
    text of the reply and does not go with tools that must be called. With `generate` False the
    prompt is computed and kept, and nothing is written.
    """

    prompt: Conversation | str | tuple[int, ...]
    caller: Caller = Caller()
    model: str = ""
    max_tokens: int | None = None
    sampling: Sampling = Sampling()
    grammar: Grammar | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    deadline: float | None = None
    generate: bool = True


class Began(NamedTuple):
    """The turn left the queue: where its prompt tokens come from."""

    prompt_tokens: int
    ram_tokens: int
    cold_tokens: int


class TextDelta(NamedTuple):
    """More of the reply's text. `logprobs` of the tokens behind it if they were asked for."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class ReasoningDelta(NamedTuple):
    """More of what the model thinks before it replies."""

    text: str


class Call(NamedTuple):
    """A whole call of a tool. `arguments` is JSON text; `id` is new."""

    id: str
    name: str
    arguments: str


class Ended(Struct, frozen=True, kw_only=True):
    """The end of a turn, and all that came of it.

    `stop_sequence` is the stop string that ended it, if one did. `tokens` and `prompt` are ids;
    `prompt_logprobs` as in `Completed`.
    """

    finish_reason: FinishReason
    text: str
    reasoning: str
    calls: tuple[Call, ...]
    usage: Usage
    ttft_seconds: float
    stop_sequence: str | None
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()


TurnEvent = Began | TextDelta | ReasoningDelta | Call | Ended
"""The events of a turn in their order: `Began`, any number of deltas and calls, `Ended`."""
