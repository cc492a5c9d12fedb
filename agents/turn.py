"""One turn of an agent: a task that asks the broker, and a handle to what comes of it."""

import hashlib
from collections.abc import Callable, Generator
from math import inf
from typing import Any, Self

import anyio
from msgspec.structs import replace

from mlx_swarm.broker.errors import AgentCancelled, EngineFailed
from mlx_swarm.broker.request import (
    Completed,
    Delta,
    Request,
    Started,
    StreamEvent,
    TokenLogprob,
    Usage,
)

from .events import (
    AgentDelta,
    AgentFailed,
    AgentFinished,
    AgentStarted,
    AgentStopped,
    Signal,
    SwarmEvent,
)
from .results import AgentResult
from .scope import Scope, Settings
from .transcript import Prompt, Transcript


class Turn:
    """What an agent was asked and what it answers: await it, or stream it, any number of times.

    It `is_followed` once the agent was asked something more, and `is_last` where nobody means to.
    """

    def __init__(
        self,
        agent: str,
        number: int,
        text: str,
        transcript: Transcript,
        scope: Scope,
        settings: Settings,
    ) -> None:
        self.agent = agent
        self.number = number
        self.is_followed = self.is_last = False
        self._text = text
        self._transcript = transcript
        self._scope = scope
        self._settings = settings
        self._cancellation = anyio.CancelScope()
        self._signal = Signal()
        self._parts: list[str] = []
        self._output_tokens = 0
        self._logprobs: list[TokenLogprob] = []
        self._started: Started | None = None
        self._completed: Completed | None = None
        self._error: Exception | None = None
        self._result: AgentResult | None = None

    @property
    def result(self) -> AgentResult | None:
        """How the turn ended; None until it has."""
        return self._result

    async def end(self) -> AgentResult:
        """Wait for the turn to be over. Never raises what ended it."""
        while self._result is None:
            await self._signal.wait()
        return self._result

    def __await__(self) -> Generator[Any, Any, str]:
        return self._reply().__await__()

    def stream(self) -> "TextStream":
        """The reply piece by piece, from its beginning; raises what ended the turn otherwise."""
        return TextStream(self)

    async def piece(self, number: int) -> str | None:
        """The reply's piece of that number, when it is there; None after the last one."""
        while number >= len(self._parts):
            if self._result is not None:
                self._result.raise_error()
                return None
            await self._signal.wait()
        return self._parts[number]

    def cancel(self) -> None:
        """End the turn now; what it had computed stays in the cache. Harmless once it is over."""
        self._cancellation.cancel()

    async def run(self, previous: "Turn | None") -> None:
        """The task: wait for the turn before and for room, then generate. Records every error."""
        try:
            with self._cancellation:
                if previous is not None:
                    await previous
                async with self._scope.limiter:
                    await self._generate()
        except Exception as error:
            self._error = error
        finally:
            self._conclude()

    async def _reply(self) -> str:
        return (await self.end()).value

    async def _generate(self) -> None:
        try:
            prompt = await self._transcript.prompt(self._scope.broker, self._text)
            async with self._scope.broker.stream(self._request(prompt)) as response:
                async for event in response:
                    self._take(event, prompt)
            if self._completed is None:
                raise EngineFailed("the broker's response ended before it was complete")
        except Exception as error:
            error.add_note(f"turn {self.number} of agent {self.agent!r}")
            raise

    def _request(self, prompt: Prompt) -> Request:
        settings, sampling = self._settings, self._settings.sampling
        seed = sampling.seed if settings.seed is None else settings.seed
        if seed is not None:
            sampling = replace(sampling, seed=derive_seed(seed, self.agent, self.number))
        return Request(
            tokens=prompt.tokens,
            boundaries=prompt.boundaries,
            max_tokens=settings.max_tokens,
            sampling=sampling,
            grammar=settings.grammar,
            stop=settings.stop,
            logprobs=settings.logprobs,
            top_logprobs=settings.top_logprobs,
            model=settings.model,
            draft=settings.draft,
            deterministic=settings.deterministic,
            tenant=settings.tenant,
            agent=self.agent,
            swarm=settings.swarm,
            priority=settings.priority,
            deadline=settings.deadline,
            next_use=0.0 if self.is_followed else inf if self.is_last else None,
            cache=settings.cache,
        )

    def _take(self, event: StreamEvent, prompt: Prompt) -> None:
        match event:
            case Delta():
                self._output_tokens += len(event.tokens)
                self._logprobs.extend(event.logprobs)
                if event.text:
                    self._parts.append(event.text)
                    self._signal.notify()
                # At every token: nothing is made that nobody listens to.
                if self._scope.feed.has_subscribers:
                    self._publish(
                        AgentDelta, text=event.text, tokens=event.tokens, logprobs=event.logprobs
                    )
            case Started():
                self._started = event
                self._publish(
                    AgentStarted,
                    prompt_tokens=event.prompt_tokens,
                    ram_tokens=event.ram_tokens,
                    cold_tokens=event.cold_tokens,
                )
            case Completed():
                self._completed = event
                if event.finish_reason != "cancelled":
                    self._transcript.append(prompt, self._text, event.text, event.tokens)

    def _conclude(self) -> None:
        """Fix the result, tell everybody, and let the next turn begin."""
        completed = self._completed
        if completed is not None and completed.finish_reason != "cancelled":
            self._finish(completed)
        else:
            self._fail(self._error or AgentCancelled(f"agent {self.agent!r} was cancelled"))
        self._signal.notify()
        self._scope.feed.turn_ends()

    def _finish(self, completed: Completed) -> None:
        self._result = AgentResult(
            agent=self.agent,
            turn=self.number,
            state="finished",
            text=completed.text,
            usage=completed.usage,
            finish_reason=completed.finish_reason,
            ttft_seconds=completed.ttft_seconds,
            logprobs=completed.logprobs,
        )
        self._publish(
            AgentFinished,
            text=completed.text,
            finish_reason=completed.finish_reason,
            usage=completed.usage,
            ttft_seconds=completed.ttft_seconds,
        )

    def _fail(self, error: Exception) -> None:
        cancelled, usage = isinstance(error, AgentCancelled), self._usage_so_far()
        self._result = AgentResult(
            agent=self.agent,
            turn=self.number,
            state="cancelled" if cancelled else "failed",
            text="".join(self._parts),
            usage=usage,
            error=error,
            logprobs=tuple(self._logprobs),
        )
        if cancelled:
            self._publish(AgentStopped, usage=usage)
        else:
            self._publish(AgentFailed, error=f"{type(error).__name__}: {error}", usage=usage)

    def _usage_so_far(self) -> Usage:
        """The cost of a turn without an end, its prompt counted as it was planned."""
        if self._completed is not None:
            return self._completed.usage
        if self._started is None:
            return Usage()
        started = self._started
        return Usage(
            requests=1,
            prompt_tokens=started.prompt_tokens,
            ram_tokens=started.ram_tokens,
            cold_tokens=started.cold_tokens,
            prefilled_tokens=started.prompt_tokens - started.ram_tokens - started.cold_tokens,
            output_tokens=self._output_tokens,
        )

    def _publish(self, kind: Callable[..., SwarmEvent], **fields: object) -> None:
        if self._scope.feed.has_subscribers:
            self._scope.feed.publish(kind(agent=self.agent, turn=self.number, **fields))


class TextStream:
    """An async iterator over a reply. It may be dropped half-way: it holds nothing open."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._seen = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        piece = await self._turn.piece(self._seen)
        if piece is None:
            raise StopAsyncIteration
        self._seen += 1
        return piece


def derive_seed(seed: int, agent: str, turn: int) -> int:
    """The seed of one turn, in [0, 2**63): the same for the same three, whatever else runs."""
    name = agent.encode("utf-8", "surrogatepass")
    digest = hashlib.sha256(b"%d,%d," % (seed, turn) + name).digest()
    return int.from_bytes(digest[:8], "big") >> 1
