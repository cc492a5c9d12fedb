"""What the bodies of OpenAI's two completion APIs have in common."""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from ..errors import InvalidRequest
from ..request import MAX_STOPS, MAX_TOP_LOGPROBS
from ..sampling import Sampling
from .errors import ApiError, invalid
from .turns.turn import Ended

MAX_CHOICES = 128

SAMPLED = (
    "top_p",
    "top_k",
    "min_p",
    "xtc_probability",
    "xtc_threshold",
    "repetition_penalty",
    "repetition_context_size",
    "presence_penalty",
    "presence_context_size",
    "frequency_penalty",
    "frequency_context_size",
    "min_tokens",
)


class StreamOptions(Struct, frozen=True):
    """How a stream is sent."""

    include_usage: bool | None = None


class CommonFields(Struct, frozen=True, kw_only=True):
    """Fields of both bodies; those that OpenAI does not have are mlx-lm's, and mean what they mean
    in `Sampling`. None is the same as nothing.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    repetition_penalty: float | None = None
    repetition_context_size: int | None = None
    presence_penalty: float | None = None
    presence_context_size: int | None = None
    frequency_penalty: float | None = None
    frequency_context_size: int | None = None
    logit_bias: dict[int, float] | None = None
    min_tokens: int | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, Any] | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with what it cost."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def choices(self) -> int:
        """How many replies to each prompt. Raises `ApiError`."""
        count = 1 if self.n is None else self.n
        if not 1 <= count <= MAX_CHOICES:
            raise invalid(f"n is {count}; it must be from 1 to {MAX_CHOICES}", "n")
        return count

    def stops(self) -> tuple[str, ...]:
        """The stop strings. Raises `ApiError`."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(given) > MAX_STOPS or "" in given:
            raise invalid(
                f"stop has {len(given):,} strings; up to {MAX_STOPS} are taken, none of them empty",
                "stop",
            )
        return tuple(given)

    def sampling(self, temperature: float) -> Sampling:
        """How tokens are chosen; `temperature` holds where the body has none. Raises `ApiError`."""
        given = {name: getattr(self, name) for name in SAMPLED}
        sampling = Sampling(
            temperature=temperature if self.temperature is None else self.temperature,
            seed=self.seed,
            logit_bias=self.logit_bias or {},
            **{name: value for name, value in given.items() if value is not None},
        )
        try:
            sampling.validate()
        except InvalidRequest as error:
            raise _of_field(error) from error
        return sampling


class PromptDetails(Struct, frozen=True):
    """Of a prompt's tokens, those that did not have to be computed."""

    cached_tokens: int


class UsageBody(Struct, frozen=True, kw_only=True):
    """What an answer cost, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class ErrorText(Struct, frozen=True):
    """An error as OpenAI writes it."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct, frozen=True):
    """The body of an answer, or the event of a stream, that is an error."""

    error: ErrorText


OptionalUsage = UsageBody | None | UnsetType
NO_USAGE = UNSET


def error_body(error: ApiError) -> ErrorBody:
    """An error's body."""
    return ErrorBody(ErrorText(error.message, error.type, error.param, error.code))


def usage_body(prompts: Sequence[Sequence[Ended]]) -> UsageBody:
    """The cost of prompts with several replies each: a prompt counts once.

    Of the replies to one prompt, that which found least in the cache says what was there before.
    """
    asked = sum(replies[0].usage.prompt_tokens for replies in prompts)
    cached = sum(min(each.usage.cached_tokens for each in replies) for replies in prompts)
    written = sum(each.usage.output_tokens for replies in prompts for each in replies)
    return UsageBody(
        prompt_tokens=asked,
        completion_tokens=written,
        total_tokens=asked + written,
        prompt_tokens_details=PromptDetails(cached),
    )


def choice_seed(seed: int | None, index: int) -> int | None:
    """The seed of one of several replies: the given one for the first, unlike ones after it."""
    if seed is None or index == 0:
        return seed
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def check_top(name: str, count: int | None) -> int:
    """How many alternatives a token comes with. Raises `ApiError`."""
    if count is not None and not 0 <= count <= MAX_TOP_LOGPROBS:
        raise invalid(f"{name} is {count}; it must be from 0 to {MAX_TOP_LOGPROBS}", name)
    return count or 0


def new_id(prefix: str) -> str:
    """An identifier of its own for an answer."""
    return f"{prefix}-{secrets.token_hex(16)}"


@cache
def fingerprint(model: str) -> str:
    """What the same seed gives the same answers with: the model and what computes it."""
    parts = [model, *(_version(name) for name in ("mlx-swarm", "mlx-lm", "mlx"))]
    return f"fp_{hashlib.sha256(' '.join(parts).encode(errors='replace')).hexdigest()[:10]}"


def caller_fields(body: CommonFields) -> Mapping[str, Any]:
    """What a body says about who calls."""
    return {
        "cache_key": body.prompt_cache_key,
        "user": body.user or body.safety_identifier,
        "metadata": body.metadata,
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _of_field(error: InvalidRequest) -> ApiError:
    """What was found wrong with the sampling, with the field that the message begins with."""
    message = str(error)
    first = message.split(" ", 1)[0]
    named = ("temperature", "seed", *SAMPLED)
    return invalid(message, first if first in named else "logit_bias")
