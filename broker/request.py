"""What is asked of the broker and what comes back: plain frozen data, no MLX.

A request gives its prompt in exactly one of three forms: `messages` (rendered with the model's chat
template), `text` (tokenized as it stands) or `tokens` (ids, used as they are).
"""

from collections.abc import Sequence
from typing import Literal, NewType, Self

from msgspec import Struct, field

from .checks import check_kind, check_range, check_sized, check_text, check_wait, check_whole
from .errors import InvalidRequest
from .grammar import Grammar as Grammar
from .messages import Message as Message
from .messages import NamedTool as NamedTool
from .messages import Tool as Tool
from .messages import ToolCall as ToolCall
from .messages import ToolChoice as ToolChoice
from .messages import check_messages as check_messages
from .messages import check_tools as check_tools
from .sampling import Sampling as Sampling

RequestId = NewType("RequestId", str)
FinishReason = Literal["stop", "length", "cancelled"]

MAX_STOPS = 64
MAX_TOP_LOGPROBS = 20
MAX_PRIORITY = 10
MAX_DEADLINE = 1e6


class Request(Struct, frozen=True, kw_only=True):
    """One prompt to be continued.

    `boundaries` marks prompt lengths in tokens up to which other requests are likely to agree (the
    end of the instructions, say); with `messages` the end of the leading system message is marked
    for you. `model` names a model or an adapter that the broker has loaded, by default its first
    one. `tenant` separates caches. `cache=False` neither reads nor writes the prompt cache.

    What the model computes is shared evenly among tenants, in a tenant among its swarms, in a swarm
    among its agents; a request without an `agent` is one of its own. A higher `priority` (-10 to
    10) goes before that, where requests wait; a lower one that has waited 10 s a level longer gets
    a turn all the same. A request that runs gives its place to one of a higher priority, and after
    1,024 tokens to an agent that is as far behind; what it has computed is kept, and its stream
    goes on later as if nothing had been (`Usage.recomputed_tokens` says what was not kept). With a
    `deadline` the request ends with `DeadlineExceeded` if it is not complete so many seconds after
    its submission; what it computed stays in the cache.

    `next_use` says in how many seconds from its end the same agent is expected to go on from there;
    inf for never. What is needed latest leaves the cache first.

    With a `grammar` the output keeps to it, and ends with the reason `stop` when it is complete;
    what `max_tokens` cuts off is a beginning of something complete.

    With `deterministic` the request runs alone and bypasses the prompt cache, both ways: what it
    computes, to the last bit, is what mlx-lm's `generate_step` computes with this model and prompt
    alone. Tokens are drawn with the request's own `seed`.

    With a `draft` the model of that name, of the same tokenizer, proposes tokens, which this one
    only checks; the request runs alone too. The output is the same as without: it takes fewer
    steps where the draft is right. It goes with all sampling, but with no grammar.

    With `logprobs` every output token comes with a `TokenLogprob`, with `top_logprobs` (up to 20)
    also with that many of the likeliest tokens in its place. With `prompt_logprobs` the prompt's
    tokens have theirs too, in `Completed` (what OpenAI calls `echo` with logprobs), and as many of
    the likeliest as `top_logprobs` says. What the cache holds without them is computed again, and
    all of the prompt for `top_logprobs`; of a prompt that was asked for before, nothing is.
    """

    messages: Sequence[Message] = ()
    text: str = ""
    tokens: Sequence[int] = ()
    max_tokens: int = 256
    sampling: Sampling = Sampling()
    grammar: Grammar | None = None
    stop: Sequence[str] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    boundaries: Sequence[int] = ()
    model: str = ""
    tenant: str = ""
    agent: str = ""
    swarm: str = ""
    priority: int = 0
    deadline: float | None = None
    next_use: float | None = None
    cache: bool = True
    deterministic: bool = False
    draft: str = ""

    def validate(self) -> None:
        """Raise `InvalidRequest` for anything that can be seen to be wrong without a model."""
        self._check_prompt()
        check_whole("max_tokens", self.max_tokens, 1, "at least 1")
        self._check_sampling()
        self._check_stops()
        self._check_logprobs()
        check_sized("boundaries", self.boundaries)
        for boundary in self.boundaries:
            check_whole("a boundary", boundary, 0, "0 or more tokens")
        check_kind("model", self.model, str, "text")
        check_text("tenant", self.tenant)
        check_kind("agent", self.agent, str, "text")
        check_kind("swarm", self.swarm, str, "text")
        check_kind("priority", self.priority, int, "a whole number")
        check_range("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        if self.deadline is not None:
            check_range("deadline", self.deadline, 0.0, MAX_DEADLINE, open_low=True)
        if self.next_use is not None:
            check_wait("next_use", self.next_use)
        check_kind("cache", self.cache, bool, "True or False")
        self._check_lane()

    def _check_prompt(self) -> None:
        forms = ("messages", "text", "tokens")
        for name in forms:
            check_sized(name, getattr(self, name))
        given = [name for name in forms if len(getattr(self, name))]
        if len(given) != 1:
            found = " and ".join(given) if given else "an empty prompt"
            raise InvalidRequest(f"give one of messages, text or tokens; got {found}")
        check_messages(self.messages)
        check_text("text", self.text or "")

    def _check_sampling(self) -> None:
        check_kind("sampling", self.sampling, Sampling, "a Sampling")
        self.sampling.validate()
        if self.grammar is not None:
            check_kind("grammar", self.grammar, Grammar, "a Grammar")
            self.grammar.validate()
        if self.sampling.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.sampling.min_tokens}; max_tokens is {self.max_tokens}, which "
                "is less"
            )

    def _check_stops(self) -> None:
        if isinstance(self.stop, str):
            raise InvalidRequest(f"stop is the text {self.stop!r}; it must be a list of strings")
        check_sized("stop", self.stop)
        if len(self.stop) > MAX_STOPS or "" in self.stop:
            raise InvalidRequest(
                f"{len(self.stop):,} stop strings given; up to {MAX_STOPS} are taken, none of them "
                "empty",
                "stop",
            )
        for stop in self.stop:
            check_kind("a stop string", stop, str, "text")

    def _check_logprobs(self) -> None:
        check_kind("logprobs", self.logprobs, bool, "True or False")
        check_kind("top_logprobs", self.top_logprobs, int, "a whole number")
        check_kind("prompt_logprobs", self.prompt_logprobs, bool, "True or False")
        check_range("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest(f"top_logprobs is {self.top_logprobs}; it needs logprobs=True")

    def _check_lane(self) -> None:
        check_kind("deterministic", self.deterministic, bool, "True or False")
        check_text("draft", self.draft)
        if self.draft and self.deterministic:
            raise InvalidRequest(
                f"deterministic=True runs a model as mlx-lm does alone; the draft {self.draft!r} "
                "cannot take part"
            )
        if self.deterministic and self.prompt_logprobs:
            raise InvalidRequest(
                "deterministic=True computes a prompt in mlx-lm's pieces, which are too long for "
                "prompt_logprobs"
            )
        if self.draft and self.grammar is not None:
            raise InvalidRequest(
                f"a grammar follows one token at a time; it does not go with the draft "
                f"{self.draft!r}"
            )


class Usage(Struct, frozen=True, kw_only=True):
    """What requests cost, in tokens and seconds; usages add up.

    prompt_tokens = ram_tokens + cold_tokens + prefilled_tokens. A prompt's last token is always
    computed, by the first decode step, and counted as prefilled: where all others were cached,
    `prefill_seconds` are next to nothing, and the time to the first token is that step's. Where a
    request gave its place to others and the cache did not keep all of it, `recomputed_tokens` of
    prompt and output were prefilled once more; no other number counts them. Seconds are summed over
    requests, so for several that ran side by side they exceed the wall time.
    """

    requests: int = 0
    prompt_tokens: int = 0
    ram_tokens: int = 0
    cold_tokens: int = 0
    prefilled_tokens: int = 0
    output_tokens: int = 0
    recomputed_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that did not have to be computed."""
        return self.ram_tokens + self.cold_tokens

    def __add__(self, other: Self) -> Self:
        sums = {name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__}
        return type(self)(**sums)


class ModelInfo(Struct, frozen=True, kw_only=True):
    """A model that requests can name. `aliases` are its other names, `base` is what it is an
    adapter of; one that is not `loaded` will be by the next request to it.
    """

    name: str
    aliases: tuple[str, ...]
    base: str
    context_length: int
    loaded: bool


class Started(Struct, frozen=True, tag=True):
    """The request left the queue: where its prompt tokens come from."""

    request: RequestId
    prompt_tokens: int
    ram_tokens: int
    cold_tokens: int


class TokenLogprob(Struct, frozen=True):
    """The natural logarithm of a token's probability, and the likeliest tokens in its place.

    Probabilities are the model's own, of the whole vocabulary: the log-softmax of its logits in
    float32, before anything that the request's sampling and grammar do to them. `top` holds pairs
    of a token and its log-probability, as many as were asked for, the likeliest first; the token
    itself need not be among them.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Delta(Struct, frozen=True, tag=True):
    """New text and the tokens behind it. Text may lag its tokens: a character can span several.

    `logprobs` has an item for each of the tokens if the request asked for them, else none.
    """

    request: RequestId
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class Completed(Struct, frozen=True, tag=True):
    """The end of a request: its whole text and output tokens (a stop token included), and its cost.

    `ttft_seconds` runs from submission to the first output token. `logprobs` has an item for each
    of the tokens if the request asked for them, else none; `prompt_logprobs` for each of the
    prompt, given those before it: None for the first, and where a cancelled request had not got to.
    """

    request: RequestId
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    ttft_seconds: float
    prompt: tuple[int, ...] = field(default=())
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()


StreamEvent = Started | Delta | Completed
