"""Chat completions and the chunks of their streams, as OpenAI writes them."""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from ..openai_fields import OptionalUsage, UsageBody

FinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class TopLogprob(Struct, frozen=True):
    """A likely token. `bytes` is the token itself, of which `token` may show only a stand-in."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(Struct, frozen=True):
    """A token of the text, and those that were likely in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class Logprobs(Struct, frozen=True):
    """The tokens of a reply's text."""

    content: list[ContentLogprob]
    refusal: None = None


class Function(Struct, frozen=True):
    """What is called, and with which JSON text. In a stream the name comes first."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallBody(Struct, frozen=True):
    """A call. In a stream it has an `index`, and its parts after the first have nothing but that
    and more arguments."""

    function: Function
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    index: int | UnsetType = UNSET


class MessageBody(Struct, frozen=True, kw_only=True):
    """A whole reply."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallBody] | UnsetType = UNSET
    function_call: Function | UnsetType = UNSET


class Choice(Struct, frozen=True, kw_only=True):
    """One of the replies to a request."""

    index: int
    message: MessageBody
    logprobs: Logprobs | None
    finish_reason: FinishReason


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """An answer that is not streamed."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: UsageBody
    system_fingerprint: str


class Delta(Struct, frozen=True, kw_only=True):
    """More of a reply."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    refusal: UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallBody] | UnsetType = UNSET
    function_call: Function | UnsetType = UNSET


class ChunkChoice(Struct, frozen=True, kw_only=True):
    """More of one of the replies. The last one of each has the finish reason."""

    index: int
    delta: Delta
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None


class Chunk(Struct, frozen=True, kw_only=True):
    """An event of a stream. With usage asked for, only the last one has any, and no choices."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: OptionalUsage = UNSET
    system_fingerprint: str
