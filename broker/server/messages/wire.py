"""The bodies of Anthropic's Messages API: optional fields may be null, unknown are left out."""

from typing import Any, Literal

from msgspec import Raw, Struct

# Requests


class CacheControl(Struct, frozen=True):
    """A mark: other prompts are likely to agree with this one up to here."""

    type: Literal["ephemeral"]


class Text(Struct, frozen=True, tag="text"):
    """Text of either side, or of the instructions."""

    text: str
    cache_control: CacheControl | None = None


class Thinking(Struct, frozen=True, tag="thinking"):
    """What the model thought. Nothing is signed here: `signature` is empty."""

    thinking: str
    signature: str = ""


class RedactedThinking(Struct, frozen=True, tag="redacted_thinking"):
    """What another server's model thought, hidden."""


class ToolUse(Struct, frozen=True, tag="tool_use"):
    """A call that the model made."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class Image(Struct, frozen=True, tag="image"):
    """Refused, by name."""


class Document(Struct, frozen=True, tag="document"):
    """Refused, by name."""


ResultPart = Text | Image | Document


class ToolResult(Struct, frozen=True, tag="tool_result"):
    """What a call came to."""

    tool_use_id: str
    content: str | list[ResultPart] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Block = Text | Thinking | RedactedThinking | ToolUse | ToolResult | Image | Document


class InputMessage(Struct, frozen=True):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolDefinition(Struct, frozen=True):
    """A tool. Those that Anthropic's servers run or define have another `type` than `custom`."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    cache_control: CacheControl | None = None


class ChosenTool(Struct, frozen=True):
    """Which tool has to be called, if any."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Struct, frozen=True):
    """Whether to think. How much is the model's to say: a budget is not enforced."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputFormat(Struct, frozen=True):
    """What the text of the reply must look like."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, frozen=True):
    """Settings of the output."""

    format: OutputFormat | None = None


class CountRequest(Struct, frozen=True, kw_only=True):
    """What makes up a prompt."""

    model: str
    messages: list[InputMessage]
    system: str | list[Text] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ChosenTool | None = None
    thinking: ThinkingConfig | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """A prompt, and how to go on with it."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    stream: bool | None = None


# Replies


class TextReply(Struct, frozen=True, tag="text"):
    """Text of the model."""

    text: str


class ToolUseReply(Struct, frozen=True, tag="tool_use"):
    """A call of a tool; `input` is JSON as the model wrote it."""

    id: str
    name: str
    input: Raw


ReplyBlock = TextReply | Thinking | ToolUseReply
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class Usage(Struct, frozen=True, kw_only=True):
    """Tokens. Those of the prompt are the first three together."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0


class Reply(Struct, frozen=True, kw_only=True, tag="message"):
    """A whole answer, or the beginning of one that is streamed."""

    id: str
    model: str
    role: Literal["assistant"] = "assistant"
    content: tuple[ReplyBlock, ...] = ()
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: Usage


class TokenCount(Struct, frozen=True):
    """How long a prompt is."""

    input_tokens: int


# Events of a stream


class MessageStart(Struct, frozen=True, tag="message_start"):
    """The request was taken. `usage` has the length of the prompt; what of it is cached follows."""

    message: Reply


class TextDelta(Struct, frozen=True, tag="text_delta"):
    """More text."""

    text: str


class ThinkingDelta(Struct, frozen=True, tag="thinking_delta"):
    """More of what the model thinks."""

    thinking: str


class SignatureDelta(Struct, frozen=True, tag="signature_delta"):
    """The end of what it thought."""

    signature: str = ""


class InputDelta(Struct, frozen=True, tag="input_json_delta"):
    """The input of a call, as text of JSON."""

    partial_json: str


Delta = TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStart(Struct, frozen=True, tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: ReplyBlock


class BlockDelta(Struct, frozen=True, tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: Delta


class BlockStop(Struct, frozen=True, tag="content_block_stop"):
    """A block is complete."""

    index: int


class Stop(Struct, frozen=True):
    """Why the reply ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, frozen=True, tag="message_delta"):
    """The reply ended; all of its usage."""

    delta: Stop
    usage: Usage


class MessageStop(Struct, frozen=True, tag="message_stop"):
    """The last event."""


class Ping(Struct, frozen=True, tag="ping"):
    """Nothing has happened for a while."""


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping
