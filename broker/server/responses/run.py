"""One response while it is computed: its events in OpenAI's sequence."""

import secrets
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import NamedTuple, Self

from anyio import to_thread
from msgspec.structs import replace

from ...messages import Message
from ..errors import ApiError, api_error
from ..reporting import report
from ..service import Service
from ..turns.generation import Generation
from ..turns.token_texts import TokenTexts
from ..turns.turn import Call, Caller, Ended, ReasoningDelta, TextDelta, TurnEvent
from .conversations import conversation
from .events import Completed, Created, Failed, Incomplete, InProgress, Lifecycle, ResponseEvent
from .items import input_items
from .logprobs import logprobs_of
from .objects import (
    IncompleteDetails,
    InputDetails,
    Item,
    OutputDetails,
    Response,
    ResponseError,
    ResponseUsage,
    Status,
)
from .output import OutputWriter
from .ring import EventRing
from .store import Stored, Stores
from .turns import response_of, turn_of
from .wire import CreateResponse

LAST = (Completed, Incomplete, Failed)
"""The events that end a response."""

NAMES = {"tokens": "input", "json_schema": "text.format.schema", "lark": "tools"}

ERROR_CODES: dict[int, str] = {
    HTTPStatus.BAD_REQUEST: "invalid_prompt",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_exceeded",
}


async def start_run(
    service: Service, body: CreateResponse, caller: Caller, stores: Stores
) -> "ResponseRun":
    """Queue the turn that a request asks for. Raises `ApiError`, before there is anything to send.

    A caller without an agent that continues a response is that response's agent, unless the agent
    went on from there already, or does something now: then it is a new one.
    """
    try:
        return await _start(service, body, caller, stores)
    except Exception as error:
        raise api_error(error, NAMES) from error


async def count_tokens(
    service: Service, body: CreateResponse, caller: Caller, stores: Stores
) -> int:
    """How many tokens the prompt has that a request makes. Raises `ApiError`."""
    try:
        asked = _asked(body, caller.tenant, stores)
        turn = turn_of(body, await _messages(body, asked), caller, service.settings)
        return len((await service.generator.prompt(turn)).tokens)
    except Exception as error:
        raise api_error(error, NAMES) from error


class _Asked(NamedTuple):
    items: tuple[Item, ...]
    previous: Stored | None


def _asked(body: CreateResponse, tenant: str, stores: Stores) -> _Asked:
    body.check()
    id = body.previous_response_id
    previous = None if id is None else stores.previous(id, tenant)
    return _Asked(input_items(body.input, lambda item: stores.find_item(item, tenant)), previous)


async def _messages(body: CreateResponse, asked: _Asked) -> tuple[Message, ...]:
    before = asked.previous.chain() if asked.previous else []
    return await to_thread.run_sync(conversation, body.instructions, before, asked.items)


async def _start(
    service: Service, body: CreateResponse, caller: Caller, stores: Stores
) -> "ResponseRun":
    asked = _asked(body, caller.tenant, stores)
    messages, previous = await _messages(body, asked), asked.previous
    response = response_of(body, await _model(service, body), service.settings)
    caller = _agent(caller, previous, stores)
    goes_on = previous is not None and bool(caller.agent) and caller.agent == previous.agent
    turn = turn_of(body, messages, caller, service.settings)
    with _continued(previous if goes_on else None):
        generation = await service.generator.start(turn)
    return ResponseRun(service, stores, generation, response, asked.items, previous)


class ResponseRun:
    """A response that is computed while its events are read.

    Read it in `async with`: leaving cancels what still runs, and keeps what came of it if the
    response is to be kept. `ring` has its events too, for others. `response` is the response as it
    is now; `error` is what made it fail.
    """

    def __init__(
        self,
        service: Service,
        stores: Stores,
        generation: Generation,
        response: Response,
        items: tuple[Item, ...],
        previous: Stored | None,
    ) -> None:
        self.id = response.id
        self.caller = generation.prompt.caller
        self.response = response
        self.error: ApiError | None = None
        self.ring = EventRing(service.settings.ring_events)
        self._stores = stores
        self._service = service
        self._generation = generation
        self._items = items
        self._previous = previous
        self._output = OutputWriter()
        self._texts = TokenTexts(service.broker.chat_format(generation.turn.model))
        self._events: AsyncGenerator[ResponseEvent, None] | None = None
        stores.live.add(self)
        weakref.finalize(self, self.ring.close)

    def cancel(self) -> None:
        """End it soon, with the status "cancelled". Does not wait."""
        self._generation.cancel()

    async def end(self) -> Response:
        """Run to the end. Raises `ApiError` if it fails."""
        async for _ in self:
            pass
        if self.error is not None:
            raise self.error
        return self.response

    def __aiter__(self) -> AsyncIterator[ResponseEvent]:
        if self._events is None:
            self._events = self._run()
        return self._events

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel what still runs and keep what came of it. Harmless when it has ended."""
        if self._events is not None:
            await self._events.aclose()
        await self._generation.__aexit__(None, None, None)
        if not self.ring.is_closed:
            for each in self._ending(Incomplete, "cancelled"):
                self._pushed(each)

    async def _run(self) -> AsyncGenerator[ResponseEvent, None]:
        """The events; each is in the ring before it is given out."""
        for kind in (Created, InProgress):
            yield self._pushed(kind(sequence_number=self._output.number(), response=self.response))
        try:
            async for event in self._generation:
                for each in await self._told(event):
                    yield self._pushed(each)
        except Exception as error:
            for each in self._failed(error):
                yield self._pushed(each)

    def _pushed(self, event: ResponseEvent) -> ResponseEvent:
        """Into the ring; with the last one the response is kept, so that it can be continued."""
        self.ring.push(event)
        if isinstance(event, LAST):
            self._stores.live.remove(self)
            self._stores.keep(self._stored())
            self.ring.close()
        return event

    def _stored(self) -> Stored:
        return Stored(
            response=self.response,
            input=self._items,
            parent=self._previous,
            tenant=self.caller.tenant,
            agent=self.caller.agent,
            swarm=self.caller.swarm,
        )

    async def _told(self, event: TurnEvent) -> Iterable[ResponseEvent]:
        match event:
            case TextDelta():
                logprobs = await logprobs_of(event.logprobs, self._texts)
                return self._output.text(event.text, logprobs)
            case ReasoningDelta():
                return self._output.reasoning(event.text)
            case Call():
                return self._output.call(event)
            case Ended():
                return self._ended(event, await self._usage(event))
        return ()

    def _ended(self, ended: Ended, usage: ResponseUsage) -> Iterator[ResponseEvent]:
        self.response = replace(self.response, usage=usage)
        if ended.finish_reason == "cancelled":
            yield from self._ending(Incomplete, "cancelled")
        elif ended.finish_reason == "length":
            details = IncompleteDetails("max_output_tokens")
            self.response = replace(self.response, incomplete_details=details)
            yield from self._ending(Incomplete, "incomplete")
        else:
            if self._output.is_empty and self._generation.turn.generate:
                yield from self._output.text("")
            self.response = replace(self.response, completed_at=int(time.time()))
            yield from self._ending(Completed, "completed")

    def _failed(self, error: Exception) -> Iterator[ResponseEvent]:
        self.error = api_error(error)
        if self.error.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            report(f"response {self.id}", error)
        code = ERROR_CODES.get(self.error.status, "server_error")
        self.response = replace(self.response, error=ResponseError(code, self.error.message))
        yield from self._ending(Failed, "failed")

    def _ending(self, kind: type[Lifecycle], status: Status) -> Iterator[ResponseEvent]:
        yield from self._output.close("completed" if status == "completed" else "incomplete")
        self.response = replace(self.response, status=status, output=tuple(self._output.items))
        yield kind(sequence_number=self._output.number(), response=self.response)

    async def _usage(self, ended: Ended) -> ResponseUsage:
        usage, reasoning = ended.usage, 0
        if ended.reasoning:
            model = self._generation.turn.model
            reasoning = len(await self._service.broker.encode(ended.reasoning, model=model))
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(usage.cached_tokens, usage.prefilled_tokens),
            output_tokens=usage.output_tokens,
            output_tokens_details=OutputDetails(min(reasoning, usage.output_tokens)),
            total_tokens=usage.prompt_tokens + usage.output_tokens,
        )


def _agent(caller: Caller, previous: Stored | None, stores: Stores) -> Caller:
    if caller.agent or previous is None or not previous.agent:
        return caller
    agent, swarm = previous.agent, caller.swarm or previous.swarm
    if previous.was_continued or stores.live.is_running(caller.tenant, agent):
        agent = f"chat-{secrets.token_hex(4)}"
    return replace(caller, agent=agent, swarm=swarm)


@contextmanager
def _continued(previous: Stored | None) -> Iterator[None]:
    """Others that continue this response are forks, unless what is done now fails."""
    if previous is None:
        yield
        return
    before, previous.was_continued = previous.was_continued, True
    try:
        yield
    except BaseException:
        previous.was_continued = before
        raise


async def _model(service: Service, body: CreateResponse) -> str:
    return body.model or (await service.broker.models())[0].name
