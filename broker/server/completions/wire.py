"""The bodies of completions: of a request, and of the answer and the chunks of its stream."""

from typing import Literal

from msgspec import UNSET, Struct

from ..openai_fields import CommonFields, OptionalUsage

FinishReason = Literal["stop", "length"]


class CompletionBody(CommonFields, frozen=True, kw_only=True):
    """A request for completions. `prompt` is a text, tokens, or a list of texts or of tokens."""

    prompt: str | list[str | int | list[int]] | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None


class Logprobs(Struct, frozen=True):
    """The tokens of a choice's text, an item of each list for each.

    `text_offset` is where a token begins in the text, in characters. A token's alternatives have
    the token itself among them. A prompt's first token has neither of the two.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Choice(Struct, frozen=True, kw_only=True):
    """One completion of one prompt; in a stream, more of it."""

    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None


class Completion(Struct, frozen=True, kw_only=True):
    """An answer, or an event of a stream: then only the last one has usage, and no choices."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: OptionalUsage = UNSET
    system_fingerprint: str
