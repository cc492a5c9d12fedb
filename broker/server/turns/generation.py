"""Turns on their way through the broker: rendered, bounded by the context, parsed, remembered."""

import secrets
from collections.abc import AsyncGenerator, Mapping
from types import TracebackType
from typing import Self

from anyio import to_thread
from msgspec.structs import replace

from ...broker import Broker
from ...errors import ContextOverflow, EngineFailed
from ...grammar import Grammar
from ...models.reply_reader import CallPiece, Piece, ReasoningPiece, ReplyReader, TextPiece
from ...request import Completed, Delta, Request, Sampling, Started, TokenLogprob
from ...response import ResponseStream
from .histories import Histories, Prompt
from .leading_space import LeadingSpace
from .turn import (
    Began,
    Call,
    Conversation,
    Ended,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    Turn,
    TurnEvent,
)

BANNED = -100.0
"""The bias of tokens that begin calls where there are to be none."""


class Generator:
    """Starts turns on a broker. `malformed` counts the tool calls that came as text."""

    def __init__(self, broker: Broker, histories: Histories, default_tokens: int | None = None):
        self.broker = broker
        self.histories = histories
        self.malformed = 0
        self.running: set[Generation] = set()
        self._default_tokens = default_tokens

    async def prompt(self, turn: Turn, most_tokens: int | None = None) -> Prompt:
        """The tokens of a turn's prompt. Raises `InvalidRequest` and `ModelNotFound`, and
        `ContextOverflow` where it is seen at once that there are more than `most_tokens`.
        """
        if isinstance(turn.prompt, Conversation):
            chat = self.broker.chat_format(turn.model)
            prompt = await to_thread.run_sync(
                self.histories.prompt, chat, turn.model, turn.prompt, turn.caller, most_tokens
            )
            return await self._begun(prompt, turn.prompt.begun, turn.model)
        if isinstance(turn.prompt, str):
            if most_tokens is not None:
                self.broker.chat_format(turn.model).check_length(turn.prompt, most_tokens)
            tokens = await self.broker.encode(turn.prompt, model=turn.model)
            return Prompt(tuple(tokens), (), turn.prompt, turn.caller)
        self.broker.chat_format(turn.model)
        return Prompt(turn.prompt, (), "", turn.caller)

    async def start(self, turn: Turn) -> "Generation":
        """Queue a turn. What would refuse it is raised here, before anything is sent."""
        prompt = await self.prompt(turn, self.broker.context_of(turn.model))
        if turn.generate and prompt.scope:
            prompt = self.histories.join(prompt)
        try:
            return await self._queued(turn, prompt)
        except BaseException:
            self.left(turn, prompt)
            raise

    def cancel_all(self) -> None:
        """End all that runs soon, as cancelled. Does not wait."""
        for each in self.running:
            each.cancel()

    def left(self, turn: Turn, prompt: Prompt) -> None:
        """A turn that was started with this prompt is over."""
        if turn.generate and prompt.scope:
            self.histories.leave(prompt)

    async def _queued(self, turn: Turn, prompt: Prompt) -> "Generation":
        request = self._request(turn, prompt)
        reader = self._reader(turn, prompt)
        stream = self.broker.stream(request)
        try:
            await stream.accepted()
        except BaseException:
            stream.cancel()
            raise
        return Generation(self, turn, prompt, stream, reader)

    async def _begun(self, prompt: Prompt, text: str, model: str) -> Prompt:
        """A prompt and the beginning of its reply."""
        if not text:
            return prompt
        tokens = await self.broker.encode(text, model=model)
        # Some tokenizers put tokens before every text.
        before = await self.broker.encode("", model=model)
        own = tokens[len(before) :] if tokens[: len(before)] == before else tokens
        return prompt._replace(tokens=(*prompt.tokens, *own), text=prompt.text + text)

    def _request(self, turn: Turn, prompt: Prompt) -> Request:
        left = self.broker.context_of(turn.model) - len(prompt.tokens)
        if left < 1:
            context = self.broker.context_of(turn.model)
            raise ContextOverflow(
                f"the prompt has {len(prompt.tokens):,} tokens; the model's context is "
                f"{context:,}, of which one at least is the reply's"
            )
        asked = turn.max_tokens or self._default_tokens or left
        max_tokens = min(asked, left) if turn.generate else 1
        return Request(
            tokens=prompt.tokens,
            boundaries=prompt.boundaries,
            max_tokens=max_tokens,
            sampling=self._sampling(turn, max_tokens),
            grammar=self._grammar(turn, prompt),
            stop=turn.stop,
            logprobs=turn.logprobs,
            top_logprobs=turn.top_logprobs,
            prompt_logprobs=turn.prompt_logprobs,
            model=turn.model,
            tenant=prompt.caller.tenant,
            agent=prompt.caller.agent,
            swarm=prompt.caller.swarm,
            priority=prompt.caller.priority,
            deadline=turn.deadline,
        )

    def _grammar(self, turn: Turn, prompt: Prompt) -> Grammar | None:
        conversation, grammar = turn.prompt, turn.grammar
        if not isinstance(conversation, Conversation):
            return grammar
        if not conversation.tools and grammar is None:
            return None
        schema = grammar.json_schema if grammar is not None else None
        of_tools = self.broker.chat_format(turn.model).grammar(
            conversation.tools,
            conversation.choice,
            parallel=conversation.parallel_calls,
            schema=schema if isinstance(schema, Mapping) else None,
            prompt_text=prompt.text,
        )
        return of_tools or grammar

    def _sampling(self, turn: Turn, max_tokens: int) -> Sampling:
        sampling, conversation = turn.sampling, turn.prompt
        tools = conversation.tools if isinstance(conversation, Conversation) else ()
        if tools and isinstance(conversation, Conversation) and conversation.choice == "none":
            banned = self.broker.chat_format(turn.model).banned_tokens()
            bias = {**sampling.logit_bias, **dict.fromkeys(banned, BANNED)}
            sampling = replace(sampling, logit_bias=bias)
        if sampling.min_tokens > max_tokens:
            sampling = replace(sampling, min_tokens=max_tokens)
        return sampling

    def _reader(self, turn: Turn, prompt: Prompt) -> ReplyReader | None:
        if not isinstance(turn.prompt, Conversation):
            return None
        tools = () if turn.prompt.choice == "none" else turn.prompt.tools
        return self.broker.chat_format(turn.model).reader(tools, prompt.text)


class Generation:
    """One turn that is queued or runs: an async iterator of its events, `Ended` last.

    An async context manager: leaving it cancels what still runs; what was computed is kept.
    """

    def __init__(
        self,
        generator: Generator,
        turn: Turn,
        prompt: Prompt,
        stream: ResponseStream,
        reader: ReplyReader | None,
    ) -> None:
        self.turn = turn
        self.prompt = prompt
        self._generator = generator
        self._stream = stream
        self._reader = reader
        self._space: LeadingSpace | None = None
        if not isinstance(turn.prompt, Conversation) or turn.prompt.begun:
            self._space = LeadingSpace(generator.broker.chat_format(turn.model))
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[Call] = []
        self._logprobs: list[TokenLogprob] = []
        self._is_over = False
        generator.running.add(self)

    async def end(self) -> Ended:
        """Run to the end."""
        async for event in self:
            if isinstance(event, Ended):
                return event
        raise EngineFailed("a request ended without saying how")

    def cancel(self) -> None:
        """End it soon, as cancelled. Does not wait."""
        self._stream.cancel()

    async def __aiter__(self) -> AsyncGenerator[TurnEvent, None]:
        async for event in self._stream:
            match event:
                case Started():
                    yield Began(event.prompt_tokens, event.ram_tokens, event.cold_tokens)
                case Delta() if self.turn.generate:
                    self._logprobs.extend(event.logprobs)
                    text = event.text
                    if self._space is not None:
                        text = await self._space.restored(text, event.tokens)
                    for each in self._pieces(text):
                        yield each
                case Completed():
                    for each in self._rest():
                        yield each
                    ended = await self._ended(event)
                    # Whoever reads this may ask for the next turn at once.
                    self._leave()
                    yield ended

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()
        self._leave()

    def _leave(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._generator.running.discard(self)
            self._generator.left(self.turn, self.prompt)

    def _pieces(self, text: str) -> list[TurnEvent]:
        if self._reader is None:
            return self._taken([TextPiece(text)] if text else [])
        return self._taken(self._reader.feed(text)) if text else []

    def _rest(self) -> list[TurnEvent]:
        if self._reader is None or not self.turn.generate:
            return []
        rest = self._taken(self._reader.finish())
        self._generator.malformed += self._reader.malformed
        return rest

    def _taken(self, pieces: list[Piece]) -> list[TurnEvent]:
        """The events of what was read, which is kept."""
        events: list[TurnEvent] = []
        for piece in pieces:
            match piece:
                case TextPiece():
                    self._text.append(piece.text)
                    events.append(TextDelta(piece.text, tuple(self._logprobs)))
                    self._logprobs.clear()
                case ReasoningPiece():
                    self._reasoning.append(piece.text)
                    events.append(ReasoningDelta(piece.text))
                    self._logprobs.clear()
                case CallPiece():
                    call = Call(f"call_{secrets.token_hex(12)}", piece.name, piece.arguments)
                    self._calls.append(call)
                    events.append(call)
                    self._logprobs.clear()
        return events

    async def _ended(self, completed: Completed) -> Ended:
        turn = self.turn
        usage, tokens = completed.usage, completed.tokens
        if not turn.generate:
            usage, tokens = replace(usage, output_tokens=0), ()
        ended = Ended(
            finish_reason=self._finish_reason(completed),
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            calls=tuple(self._calls),
            usage=usage,
            ttft_seconds=completed.ttft_seconds,
            stop_sequence=await self._stop_sequence(completed),
            prompt=self.prompt.tokens,
            tokens=tokens,
            logprobs=completed.logprobs,
            prompt_logprobs=completed.prompt_logprobs,
        )
        if isinstance(turn.prompt, Conversation) and turn.generate:
            self._generator.histories.keep(self.prompt, turn.model, turn.prompt, ended)
        return ended

    def _finish_reason(self, completed: Completed) -> FinishReason:
        if completed.finish_reason == "cancelled":
            return "cancelled"
        if not self.turn.generate:
            return "stop"
        return "tool_calls" if self._calls else completed.finish_reason

    async def _stop_sequence(self, completed: Completed) -> str | None:
        """Which stop string the output ended before."""
        if not self.turn.stop or completed.finish_reason != "stop":
            return None
        chat = self._generator.broker.chat_format(self.turn.model)
        raw = await to_thread.run_sync(chat.decode, completed.tokens)
        # The text may lack the space that the first token begins with.
        for text in (raw, raw.removeprefix(" ")):
            if text.startswith(completed.text):
                rest = text[len(completed.text) :]
                for stop in self.turn.stop:
                    if rest.startswith(stop):
                        return stop
        return None
