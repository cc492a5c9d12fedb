"""One agent: a handle to a conversation whose turns run in the background."""

from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager, suppress
from typing import Any

from mlx_swarm.broker.checks import check_kind
from mlx_swarm.broker.errors import BrokerClosed, CacheError, InvalidRequest, SwarmClosed
from mlx_swarm.broker.request import Message, Usage

from .results import AgentResult
from .scope import Scope, Settings
from .transcript import Transcript
from .turn import TextStream, Turn

TOOL_SECONDS = 5.0
"""What a tool is expected to take of which nothing is known."""


class Agent:
    """A conversation with the model, made by `Swarm.spawn`.

    `await agent` waits for its latest turn and returns the reply, or raises what ended it.
    Cancelling one who waits leaves the agent running; `cancel` ends it.
    """

    def __init__(self, name: str, instructions: str, scope: Scope, settings: Settings) -> None:
        self.name = name
        self._scope = scope
        self._settings = settings
        self._transcript = Transcript(instructions, settings.model)
        self._turns: list[Turn] = []

    def ask(self, text: str) -> Turn:
        """Say `text` once the turn before is complete; `await` what this returns for the reply.

        The turn runs whether or not it is awaited. Raises `InvalidRequest` for an empty text,
        `SwarmClosed` after the swarm's scope, and what ended the agent if it is not alive.
        """
        check_task(text)
        if self._scope.closed:
            raise SwarmClosed(f"agent {self.name!r} was asked after its swarm's scope had ended")
        previous = self._turns[-1] if self._turns else None
        if previous is not None and previous.result is not None:
            previous.result.raise_error()
        if previous is not None:
            previous.is_followed = True
        number = len(self._turns)
        turn = Turn(self.name, number, text, self._transcript, self._scope, self._settings)
        self._turns.append(turn)
        self._scope.feed.turn_begins()
        self._scope.tasks.start_soon(turn.run, previous, name=f"{self.name} turn {number}")
        return turn

    def __await__(self) -> Generator[Any, Any, str]:
        return self._turns[-1].__await__()

    def stream(self) -> TextStream:
        """The latest turn's reply piece by piece, from its beginning; raises what ended it."""
        return self._turns[-1].stream()

    @asynccontextmanager
    async def tool(self, seconds: float = TOOL_SECONDS) -> AsyncIterator[None]:
        """Run a tool between two turns, `async with agent.tool(seconds=5.0): ...`.

        While it runs, and for about so many seconds, the conversation stays in memory, as far as
        the broker has room for that; what it refuses costs the next turn time, and nobody else.
        """
        name, settings = self.name, self._settings
        with suppress(CacheError):  # the broker counts what it refuses
            await self._scope.broker.pin(
                seconds, agent=name, swarm=settings.swarm, tenant=settings.tenant
            )
        try:
            yield
        finally:
            with suppress(BrokerClosed):
                self._scope.broker.unpin(agent=name, swarm=settings.swarm, tenant=settings.tenant)

    def cancel(self) -> None:
        """End what runs or waits, now; what was computed stays in the cache."""
        for turn in self._turns:
            turn.cancel()

    @property
    def result(self) -> AgentResult | None:
        """How the latest turn ended; None until it has."""
        return self._turns[-1].result

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns, oldest first."""
        return tuple(self._turns)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation up to the last complete reply."""
        return self._transcript.messages

    @property
    def tokens(self) -> tuple[int, ...]:
        """The conversation as tokens; a further turn's prompt begins with them."""
        return self._transcript.tokens

    @property
    def usage(self) -> Usage:
        """The cost of all turns that are over, failed ones included."""
        return sum((turn.result.usage for turn in self._turns if turn.result), Usage())

    def __repr__(self) -> str:
        state = self.result.state if self.result else "running"
        return f"<Agent {self.name!r}, {len(self._turns)} turns, {state}>"


def check_task(text: str) -> None:
    """Raise `InvalidRequest` for a task that is no text or has no words."""
    check_kind("the task", text, str, "text")
    if not text.strip():
        raise InvalidRequest("the task is empty; an agent needs something to do")
