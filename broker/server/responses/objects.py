"""What the Responses API shows of a response: the response itself, its output items, its usage."""

from typing import Any, Literal

from msgspec import Struct, field

Status = Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
Item = dict[str, Any]
"""An input item as the client sent it, with an id."""


class TopLogprob(Struct, frozen=True):
    """One of the likeliest tokens in a place."""

    token: str
    logprob: float
    bytes: tuple[int, ...]


class Logprob(Struct, frozen=True):
    """A token of the output and the natural logarithm of its probability."""

    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: tuple[TopLogprob, ...] = ()


class OutputText(Struct, frozen=True, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[Logprob, ...] = ()


class ReasoningText(Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    """What the model thought."""

    text: str


class OutputMessage(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A message to whoever asked."""

    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: tuple[OutputText, ...] = ()


class OutputReasoning(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought before a message or a call."""

    id: str
    status: ItemStatus
    summary: tuple[()] = ()
    content: tuple[ReasoningText, ...] = ()


class OutputCall(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call of one of the client's functions; `arguments` is JSON text."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputDetails(Struct, frozen=True):
    """Input tokens that did not have to be computed, and those that were, and are kept."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(Struct, frozen=True):
    """Output tokens that are not part of the reply's text."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct, frozen=True, kw_only=True):
    """What a response cost, in tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(Struct, frozen=True):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(Struct, frozen=True):
    """Why a response is not complete."""

    reason: str


class Response(Struct, frozen=True, kw_only=True):
    """A response, as it is at one time, and what was asked for."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    model: str
    output: tuple[OutputItem, ...] = ()
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, Any] | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool = True
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any] = "auto"
    tools: tuple[dict[str, Any], ...] = ()
    top_logprobs: int = 0
    top_p: float = 1.0
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
