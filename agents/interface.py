"""What a swarm needs of a broker, whether it runs in this process or not."""

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Protocol, Self

from mlx_swarm.broker.request import Message, Request, StreamEvent


class RenderedPrompt(Protocol):
    """A conversation as tokens, ready for a reply.

    `boundaries` are the lengths up to which every conversation with the same leading system message
    has the same tokens.
    """

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def boundaries(self) -> Sequence[int]: ...


class Response(Protocol):
    """The events of one request, `Completed` last. Leaving the context cancels what still runs."""

    def __aiter__(self) -> AsyncIterator[StreamEvent]: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None: ...


class SwarmBroker(Protocol):
    """A broker as agents see it."""

    def stream(self, request: Request) -> Response: ...
    async def render(self, messages: Sequence[Message], *, model: str = "") -> RenderedPrompt: ...
    def next_use(
        self, seconds: float, *, agent: str = "", swarm: str = "", tenant: str = ""
    ) -> None:
        """When an agent, or without a name the whole swarm, is expected to go on; inf for never."""

    async def pin(self, seconds: float, *, agent: str, swarm: str = "", tenant: str = "") -> int:
        """Keep what an agent said last. Raises `CacheError` where too much is kept already."""

    def unpin(self, *, agent: str, swarm: str = "", tenant: str = "") -> None:
        """Keep it no longer."""
