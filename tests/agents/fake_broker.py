"""A broker without a model: it renders one token a character, remembers what it was sent, and says
what a test tells it to say."""

from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Self

import anyio
from msgspec import Struct

from mlx_swarm.broker.errors import CacheError
from mlx_swarm.broker.request import (
    Completed,
    Delta,
    FinishReason,
    Message,
    Request,
    RequestId,
    Started,
    StreamEvent,
    TokenLogprob,
    Usage,
)

END = 0
ROLES = {"system": 1, "user": 2, "assistant": 3}
FIRST_CHARACTER = 10
WITHHELD = "~"


class Rendered(Struct, frozen=True):
    tokens: list[int]
    boundaries: tuple[int, ...]


class Reply(Struct, frozen=True):
    """What the broker answers: text, then an error, an end or neither. A `gate` holds it up."""

    text: str = "ok"
    error: Exception | None = None
    finish_reason: FinishReason | None = "stop"
    gate: anyio.Event | None = None


class FakeBroker:
    """`answer` makes the reply to a request; `requests` keeps them, `open` counts those live.

    `steered` are the hints of a next use, `pinned` the agents whose KV is to stay.
    """

    def __init__(self, answer: Callable[[Request], Reply] = lambda request: Reply()) -> None:
        self.answer = answer
        self.requests: list[Request] = []
        self.open = 0
        self.most_open = 0
        self.stored: list[tuple[int, ...]] = []
        self.steered: list[tuple[str, str, str, float]] = []
        self.pinned: dict[str, float] = {}
        self.refuses_pins = False

    def next_use(
        self, seconds: float, *, agent: str = "", swarm: str = "", tenant: str = ""
    ) -> None:
        self.steered.append((agent, swarm, tenant, seconds))

    async def pin(self, seconds: float, *, agent: str, swarm: str = "", tenant: str = "") -> int:
        await anyio.lowlevel.checkpoint()
        if self.refuses_pins:
            raise CacheError("3 GiB would be pinned; the limit is 1 GiB")
        self.pinned[agent] = seconds
        return 1

    def unpin(self, *, agent: str, swarm: str = "", tenant: str = "") -> None:
        self.pinned.pop(agent, None)

    async def render(self, messages: Sequence[Message], *, model: str = "") -> Rendered:
        await anyio.lowlevel.checkpoint()
        tokens: list[int] = []
        boundaries: tuple[int, ...] = ()
        for number, message in enumerate(messages):
            tokens += [ROLES[message.role], *characters(message.content), END]
            if number == 0 and message.role == "system":
                boundaries = (len(tokens),)
        return Rendered([*tokens, ROLES["assistant"]], boundaries)

    def stream(self, request: Request) -> "FakeResponse":
        request.validate()
        self.requests.append(request)
        return FakeResponse(self, request)

    def cached(self, tokens: Sequence[int]) -> int:
        """The longest prefix of a prompt that some earlier request had, but for its last token."""
        longest = max((common(tokens, stored) for stored in self.stored), default=0)
        return min(longest, len(tokens) - 1)


class FakeResponse:
    def __init__(self, broker: FakeBroker, request: Request) -> None:
        self._broker = broker
        self._request = request
        self._events = self._run(RequestId(f"r{len(broker.requests)}"))

    async def __aenter__(self) -> Self:
        self._broker.open += 1
        self._broker.most_open = max(self._broker.most_open, self._broker.open)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._broker.open -= 1

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamEvent:
        return await anext(self._events)

    async def _run(self, name: RequestId) -> AsyncIterator[StreamEvent]:
        broker, prompt = self._broker, tuple(self._request.tokens)
        reply, cached = broker.answer(self._request), broker.cached(prompt)
        yield Started(name, len(prompt), cached, 0)
        tokens = tuple(characters(reply.text))
        for number, (character, token) in enumerate(zip(reply.text, tokens, strict=True)):
            await anyio.lowlevel.checkpoint()
            if reply.gate is not None and number == len(tokens) // 2:
                await reply.gate.wait()
            text = character if character != WITHHELD else ""
            yield Delta(name, text, (token,), self._logprobs((token,)))
        if reply.error is not None:
            raise reply.error
        if reply.finish_reason is None:
            return
        if reply.finish_reason == "stop":
            tokens += (END,)
        broker.stored.append(prompt + tokens[:-1])
        usage = Usage(
            requests=1,
            prompt_tokens=len(prompt),
            ram_tokens=cached,
            prefilled_tokens=len(prompt) - cached,
            output_tokens=len(tokens),
        )
        yield Completed(
            name,
            reply.text,
            tokens,
            reply.finish_reason,
            usage,
            0.5,
            logprobs=self._logprobs(tokens),
        )

    def _logprobs(self, tokens: Sequence[int]) -> tuple[TokenLogprob, ...]:
        if not self._request.logprobs:
            return ()
        top = self._request.top_logprobs
        return tuple(TokenLogprob(token, -1.0, ((token, -1.0),) * top) for token in tokens)


def characters(text: str) -> list[int]:
    return [FIRST_CHARACTER + ord(character) for character in text]


def user_text(request: Request) -> str:
    """What the user said last in a rendered prompt."""
    tokens = list(request.tokens)
    start = len(tokens) - tokens[::-1].index(ROLES["user"])
    return "".join(chr(token - FIRST_CHARACTER) for token in tokens[start:-2])


def common(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
