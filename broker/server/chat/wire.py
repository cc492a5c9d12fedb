"""The body of a request for a chat completion. Every field that may be left out may be null."""

from typing import Any, Literal

from msgspec import Struct

from ..openai_fields import CommonFields

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Part(Struct, frozen=True):
    """A part of a message; only parts of the types `text` and `refusal` are taken."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Struct, frozen=True):
    """Which function is called, and with what: JSON text."""

    name: str
    arguments: str | None = None


class CallBody(Struct, frozen=True):
    """A call that an assistant made."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = None


class MessageBody(Struct, frozen=True):
    """A message of a conversation. `reasoning` is another name of `reasoning_content`."""

    role: Role
    content: str | list[Part] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallBody] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None


class FunctionBody(Struct, frozen=True):
    """A function that a model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Struct, frozen=True):
    """A tool."""

    type: Literal["function"]
    function: FunctionBody


class FunctionName(Struct, frozen=True):
    """A function by its name."""

    name: str


class ToolName(Struct, frozen=True):
    """A tool by the name of its function."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Struct, frozen=True):
    """Some of the tools: they may be called, or have to be."""

    mode: Literal["auto", "required"]
    tools: list[ToolName]


class ChosenTool(Struct, frozen=True):
    """The tool that has to be called, or those that are allowed."""

    type: Literal["function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class SchemaBody(Struct, frozen=True):
    """A JSON schema by a name."""

    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True):
    """What the text of a reply has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaBody | None = None


class TemplateSettings(Struct, frozen=True):
    """What is passed to a chat template elsewhere; here it turns reasoning on or off."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class ChatBody(CommonFields, frozen=True, kw_only=True):
    """A request for a chat completion."""

    messages: list[MessageBody]
    max_completion_tokens: int | None = None
    tools: list[ToolBody] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    functions: list[FunctionBody] | None = None
    function_call: Literal["none", "auto"] | FunctionName | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateSettings | None = None
    modalities: list[Literal["text", "audio"]] | None = None
