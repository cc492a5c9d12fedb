"""Anthropic's Messages API over HTTP."""

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from ...errors import ContextOverflow, SwarmError
from ..bodies import read, respond
from ..entrance.refusals import error_body, new_request_id, refusal
from ..errors import ApiError, api_error, invalid
from ..http import EventStream, frame, unless_gone
from ..openapi import Operation
from ..service import Service
from ..turns.callers import caller
from ..turns.generation import Generation
from ..turns.turn import Caller, Turn
from .replies import ReplyBuilder, marked_length
from .turns import Asked, asked, conversation
from .wire import CountRequest, Event, MessagesRequest, Ping, Reply, TokenCount

PATH = "/v1/messages"

OPERATIONS = (
    Operation(
        "POST",
        PATH,
        "Create a message, as Anthropic's API does",
        body=MessagesRequest,
        response=Reply,
        errors=(404, 429, 503, 504),
        events=Event,
    ),
    Operation(
        "POST",
        f"{PATH}/count_tokens",
        "Count the tokens of a message's prompt",
        body=CountRequest,
        response=TokenCount,
        errors=(404,),
    ),
)


def routes(service: Service) -> list[BaseRoute]:
    """The endpoints of the API."""
    messages = _Messages(service)
    return [
        Route(PATH, messages.create, methods=["POST"]),
        Route(f"{PATH}/count_tokens", messages.count, methods=["POST"]),
    ]


class _Messages:
    """Answers requests. Headers of versions and betas are not looked at."""

    def __init__(self, service: Service) -> None:
        self._settings = service.settings
        self._broker = service.broker
        self._generator = service.generator

    async def create(self, request: Request) -> Response:
        """A message, whole or as a stream."""
        return await _named(request, self._create)

    async def count(self, request: Request) -> Response:
        """The length of a prompt, nothing computed."""
        return await _named(request, self._count)

    async def _create(self, request: Request, identifier: str) -> Response:
        body = await read(request, MessagesRequest)
        what = asked(body, _caller(request, body), self._settings.temperature)
        if body.stream:
            generation = await unless_gone(request, lambda: self._start(what.turn))
            return self._stream(what, generation, identifier)
        return respond(await unless_gone(request, lambda: self._reply(what)))

    async def _count(self, request: Request, identifier: str) -> Response:
        body = await read(request, CountRequest)
        turn = Turn(prompt=conversation(body), caller=_caller(request), model=body.model)
        prompt = await self._generator.prompt(turn)
        return respond(TokenCount(len(prompt.tokens)))

    async def _start(self, turn: Turn) -> Generation:
        try:
            return await self._generator.start(turn)
        except ContextOverflow as error:
            try:
                prompt = await self._generator.prompt(turn, self._broker.context_of(turn.model))
            except ContextOverflow:
                raise _too_long(str(error)) from error
            longest = self._broker.context_of(turn.model) - 1
            if len(prompt.tokens) <= longest:
                raise
            raise _too_long(f"{len(prompt.tokens)} tokens > {longest} maximum") from error

    async def _reply(self, what: Asked) -> Reply:
        async with await self._start(what.turn) as generation:
            builder = _builder(what, generation)
            async for event in generation:
                builder.take(event)
        return builder.reply

    def _stream(self, what: Asked, generation: Generation, identifier: str) -> Response:
        frames = _frames(generation, _builder(what, generation), identifier)
        return _MessageStream(
            generation, frames, ping_seconds=self._settings.ping_seconds, ping=_frame(Ping())
        )


class _MessageStream(EventStream):
    """Ends its turn also if the client goes away before the first event."""

    def __init__(
        self,
        generation: Generation,
        frames: AsyncIterator[bytes],
        *,
        ping_seconds: float,
        ping: bytes,
    ) -> None:
        super().__init__(frames, ping_seconds=ping_seconds, ping=ping)
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._generation:
            await super().__call__(scope, receive, send)


async def _named(
    request: Request, answer: Callable[[Request, str], Awaitable[Response]]
) -> Response:
    """The answer, or the error instead of it, under the name that Anthropic's clients read."""
    identifier = request.scope.get("state", {}).get("request_id") or new_request_id()
    try:
        response = await answer(request, identifier)
    except RecursionError:
        response = refusal(PATH, invalid("the body is nested too deeply"), identifier)
    except (SwarmError, TimeoutError) as error:
        response = refusal(PATH, api_error(error), identifier)
    response.headers["request-id"] = identifier
    return response


async def _frames(
    generation: Generation, builder: ReplyBuilder, identifier: str
) -> AsyncIterator[bytes]:
    yield _frame(builder.start())
    try:
        async for event in generation:
            for each in builder.take(event):
                yield _frame(each)
    except Exception as error:
        yield frame(error_body(PATH, api_error(error), identifier), "error")
        if not isinstance(error, SwarmError):
            raise


def _frame(event: Event) -> bytes:
    return frame(event, str(event.__struct_config__.tag))


def _builder(what: Asked, generation: Generation) -> ReplyBuilder:
    prompt = generation.prompt
    identifier = f"msg_{secrets.token_hex(12)}"
    marked = marked_length(prompt, what.marks)
    return ReplyBuilder(identifier, what.turn.model, len(prompt.tokens), marked)


def _too_long(how: str) -> ApiError:
    """In the words by which clients know that a conversation has to be made shorter."""
    return invalid(f"prompt is too long: {how}", "messages", "context_length_exceeded")


def _caller(request: Request, body: MessagesRequest | None = None) -> Caller:
    metadata = body.metadata if body is not None and body.metadata is not None else {}
    user = metadata.get("user_id")
    if user is not None and not isinstance(user, str):
        raise invalid("metadata.user_id: it must be text", "metadata.user_id")
    return caller(request, user=user, metadata=metadata)
