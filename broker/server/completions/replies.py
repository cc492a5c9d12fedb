"""From the events of turns to completions, or to the chunks of a stream of them."""

import time
from collections.abc import AsyncIterator
from typing import NamedTuple

from ...request import TokenLogprob
from ..openai_fields import NO_USAGE, OptionalUsage, UsageBody, fingerprint, new_id, usage_body
from ..turns.choices import Events
from ..turns.token_texts import TokenTexts
from ..turns.turn import Began, Ended, TextDelta
from .logprobs import LogprobsWriter, joined
from .turns import PromptOf
from .wire import Choice, Completion, FinishReason


class Asked(NamedTuple):
    """What a request wants to see: `choices` of each of the prompts."""

    model: str
    prompts: list[PromptOf]
    choices: int
    echo: bool = False
    logprobs: bool = False
    usage: bool = False
    generate: bool = True


class Answer:
    """One answer to a request: its id and time, and what is the same in all parts of it."""

    def __init__(self, asked: Asked, texts: TokenTexts) -> None:
        count = len(asked.prompts) * asked.choices
        self._asked = asked
        self._texts = texts
        self._id = new_id("cmpl")
        self._created = int(time.time())
        self._ended: dict[int, Ended] = {}
        self._writers = [LogprobsWriter(texts) for _ in range(count)]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(count)]

    async def whole(self, events: Events) -> Completion:
        """Everything at once, when all has come. Raises what `events` raises."""
        async for index, event in events:
            self._take(index, event)
        choices = [await self._choice(index) for index in range(len(self._writers))]
        return self._completion(choices, self._usage())

    async def chunks(self, events: Events) -> AsyncIterator[Completion]:
        """One after the other, those of all choices mixed. Raises what `events` raises.

        Log-probabilities of a prompt are known at the end, so with them a choice comes at once.
        """
        at_once = self._asked.echo and self._asked.logprobs
        async for index, event in events:
            self._take(index, event)
            match event:
                case Began() if self._asked.echo and not at_once:
                    yield self._chunk(Choice(index=index, text=await self._prompt_text(index)))
                case TextDelta() if not at_once:
                    yield self._chunk(await self._delta(index, event))
                case Ended() if at_once:
                    yield self._chunk(await self._choice(index))
                case Ended():
                    reason = self._finish_reason(event)
                    yield self._chunk(Choice(index=index, text="", finish_reason=reason))
        if self._asked.usage:
            yield self._completion([], self._usage())

    def _take(self, index: int, event: object) -> None:
        if isinstance(event, TextDelta):
            self._logprobs[index] += event.logprobs
        elif isinstance(event, Ended):
            self._ended[index] = event

    async def _choice(self, index: int) -> Choice:
        """A choice that has come to its end."""
        ended, logprobs, before = self._ended[index], None, ""
        if self._asked.echo:
            before = await self._prompt_text(index)
        if self._asked.logprobs:
            writer = self._writers[index]
            if self._asked.echo:
                prompt = await writer.prompt(before, ended.prompt, ended.prompt_logprobs)
                logprobs = joined(prompt, await writer.reply(self._logprobs[index]))
            else:
                logprobs = await writer.reply(self._logprobs[index])
        return Choice(
            index=index,
            text=before + ended.text,
            logprobs=logprobs,
            finish_reason=self._finish_reason(ended),
        )

    async def _delta(self, index: int, delta: TextDelta) -> Choice:
        logprobs = None
        if self._asked.logprobs:
            logprobs = await self._writers[index].reply(delta.logprobs)
        return Choice(index=index, text=delta.text, logprobs=logprobs)

    async def _prompt_text(self, index: int) -> str:
        prompt = self._asked.prompts[index // self._asked.choices]
        if isinstance(prompt, str):
            return prompt
        await self._texts.look_up(prompt)
        return self._texts.text(prompt)

    def _finish_reason(self, ended: Ended) -> FinishReason:
        if not self._asked.generate:
            return "length"
        return "length" if ended.finish_reason == "length" else "stop"

    def _usage(self) -> UsageBody:
        each = self._asked.choices
        starts = range(0, len(self._writers), each)
        return usage_body([[self._ended[at + nth] for nth in range(each)] for at in starts])

    def _chunk(self, choice: Choice) -> Completion:
        return self._completion([choice], None if self._asked.usage else NO_USAGE)

    def _completion(self, choices: list[Choice], usage: OptionalUsage) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._asked.model,
            choices=choices,
            usage=usage,
            system_fingerprint=fingerprint(self._asked.model),
        )
