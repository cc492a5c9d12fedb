"""The body of a request for a response. Unknown fields are left out; null is as good as absent."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from ..errors import invalid

INCLUDE_LOGPROBS = "message.output_text.logprobs"

Positive = Annotated[int, Meta(ge=1)]


class TextFormat(Struct, frozen=True, omit_defaults=True):
    """What the text must look like; a `schema` goes with `json_schema`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(Struct, frozen=True):
    """How the text is to be; `verbosity` changes nothing here."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Struct, frozen=True):
    """How much the model is to think: `none` and `minimal` mean not at all, if it can do without.

    `summary` changes nothing: what the model thought is given as it stands.
    """

    effort: str | None = None
    summary: str | None = None


class CacheOptions(Struct, frozen=True):
    """With `prewarm` the prompt is computed and kept, and nothing is written."""

    prewarm: bool | None = None


class CreateResponse(Struct, frozen=True, kw_only=True):
    """What a response is asked for with.

    Beyond OpenAI's: `generate` False computes and keeps the prompt and writes nothing; `stop` and
    from `top_k` on the settings of the same names of mlx-lm. `truncation` "auto" drops nothing: a
    conversation that is too long is refused either way, and the response says "disabled".
    """

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: Positive | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None

    generate: bool | None = None
    stop: str | list[str] | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    logit_bias: dict[int, float] | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    @property
    def is_stored(self) -> bool:
        """Whether the response can be asked for later."""
        return self.store is not False

    @property
    def writes(self) -> bool:
        """Whether anything is to be written."""
        prewarm = self.prompt_cache_options is not None and self.prompt_cache_options.prewarm
        return self.generate is not False and not prewarm

    @property
    def wants_logprobs(self) -> bool:
        """Whether the output's tokens come with their probabilities."""
        return INCLUDE_LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def check(self) -> None:
        """Raise `ApiError` for what is not done here."""
        if self.background:
            raise invalid("responses are not computed in the background here", "background")
        if self.conversation is not None:
            raise invalid(
                "conversations are not kept here; use previous_response_id", "conversation"
            )
        if self.prompt is not None:
            raise invalid("prompt templates are not kept here; send the input", "prompt")


class FunctionTool(Struct, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """A function of the client that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class AllowedTool(Struct, frozen=True):
    """One of the tools that may be called."""

    name: str
    type: Literal["function"] = "function"


class ChosenTool(Struct, frozen=True):
    """A choice of tools: one that has to be called, or those that may be."""

    type: Literal["function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[AllowedTool] = field(default_factory=list)
