"""From the events of turns to a chat completion, or to the chunks of a stream."""

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import NamedTuple

from msgspec import UNSET

from ...request import TokenLogprob
from ..openai_fields import NO_USAGE, fingerprint, new_id, usage_body
from ..turns.choices import Events
from ..turns.token_texts import TokenTexts
from ..turns.turn import Began, Call, Ended, ReasoningDelta, TextDelta
from .objects import (
    ChatCompletion,
    Choice,
    Chunk,
    ChunkChoice,
    ContentLogprob,
    Delta,
    FinishReason,
    Function,
    Logprobs,
    MessageBody,
    ToolCallBody,
    TopLogprob,
)


class Asked(NamedTuple):
    """What a request wants to see. `functions`: it knows the API that was there before tools."""

    model: str
    choices: int
    logprobs: bool = False
    usage: bool = False
    functions: bool = False


class Answer:
    """One answer to a request: its id and time, and what is the same in all parts of it."""

    def __init__(self, asked: Asked, texts: TokenTexts) -> None:
        self._asked = asked
        self._texts = texts
        self._id = new_id("chatcmpl")
        self._created = int(time.time())
        self._ended: dict[int, Ended] = {}
        self._calls = [0] * asked.choices

    async def whole(self, events: Events) -> ChatCompletion:
        """Everything at once, when all has come. Raises what `events` raises."""
        logprobs: list[list[TokenLogprob]] = [[] for _ in range(self._asked.choices)]
        async for index, event in events:
            match event:
                case TextDelta():
                    logprobs[index] += event.logprobs
                case Ended():
                    self._ended[index] = event
        ended = self._all_ended()
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._asked.model,
            choices=[
                Choice(
                    index=index,
                    message=self._message(each),
                    logprobs=await self._logprobs(logprobs[index]),
                    finish_reason=self._finish_reason(each),
                )
                for index, each in enumerate(ended)
            ],
            usage=usage_body([ended]),
            system_fingerprint=fingerprint(self._asked.model),
        )

    async def chunks(self, events: Events) -> AsyncIterator[Chunk]:
        """One after the other, those of all choices mixed. Raises what `events` raises."""
        async for index, event in events:
            match event:
                case Began():
                    yield self._chunk(index, Delta(role="assistant", content="", refusal=None))
                case TextDelta():
                    logprobs = await self._logprobs(event.logprobs)
                    yield self._chunk(index, Delta(content=event.text), logprobs)
                case ReasoningDelta():
                    yield self._chunk(index, Delta(reasoning_content=event.text))
                case Call():
                    for delta in self._call(index, event):
                        yield self._chunk(index, delta)
                case Ended():
                    self._ended[index] = event
                    yield self._chunk(index, Delta(), finish_reason=self._finish_reason(event))
        if self._asked.usage:
            yield self._last()

    def _all_ended(self) -> list[Ended]:
        return [self._ended[index] for index in range(self._asked.choices)]

    def _message(self, ended: Ended) -> MessageBody:
        calls = ended.calls
        if self._asked.functions:
            return MessageBody(
                content=ended.text or (None if calls else ""),
                reasoning_content=ended.reasoning or UNSET,
                function_call=_function(calls[0]) if calls else UNSET,
            )
        return MessageBody(
            content=ended.text or (None if calls else ""),
            reasoning_content=ended.reasoning or UNSET,
            tool_calls=[ToolCallBody(_function(each), each.id, "function") for each in calls]
            or UNSET,
        )

    def _call(self, index: int, call: Call) -> Iterator[Delta]:
        """A call in two parts: who is called, then with what."""
        number = self._calls[index]
        self._calls[index] += 1
        if self._asked.functions:
            if number == 0:
                yield Delta(function_call=Function("", call.name))
                yield Delta(function_call=Function(call.arguments))
            return
        yield Delta(tool_calls=[ToolCallBody(Function("", call.name), call.id, "function", number)])
        yield Delta(tool_calls=[ToolCallBody(Function(call.arguments), index=number)])

    def _finish_reason(self, ended: Ended) -> FinishReason:
        if ended.finish_reason == "tool_calls":
            return "function_call" if self._asked.functions else "tool_calls"
        return "length" if ended.finish_reason == "length" else "stop"

    async def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> Logprobs | None:
        if not self._asked.logprobs:
            return None
        await self._texts.learn(logprobs)
        return Logprobs([self._content(each) for each in logprobs])

    def _content(self, each: TokenLogprob) -> ContentLogprob:
        texts = self._texts
        top = [
            TopLogprob(texts.text_of(token), logprob, list(texts.bytes_of(token)))
            for token, logprob in each.top
        ]
        token = each.token
        return ContentLogprob(texts.text_of(token), each.logprob, list(texts.bytes_of(token)), top)

    def _chunk(
        self,
        index: int,
        delta: Delta,
        logprobs: Logprobs | None = None,
        finish_reason: FinishReason | None = None,
    ) -> Chunk:
        return Chunk(
            id=self._id,
            created=self._created,
            model=self._asked.model,
            choices=[
                ChunkChoice(
                    index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason
                )
            ],
            usage=None if self._asked.usage else NO_USAGE,
            system_fingerprint=fingerprint(self._asked.model),
        )

    def _last(self) -> Chunk:
        return Chunk(
            id=self._id,
            created=self._created,
            model=self._asked.model,
            choices=[],
            usage=usage_body([self._all_ended()]),
            system_fingerprint=fingerprint(self._asked.model),
        )


def _function(call: Call) -> Function:
    return Function(call.arguments, call.name)
