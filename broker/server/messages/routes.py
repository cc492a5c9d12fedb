"""Anthropic's Messages API over HTTP."""

import logging
import secrets
from collections.abc import AsyncIterator
from http import HTTPStatus

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from ...errors import ContextOverflow
from ..bodies import read, respond
from ..callers import caller
from ..errors import ApiError, api_error, invalid
from ..generation import Generation
from ..http import CLIENT_CLOSED_REQUEST, EventStream, Gone, frame, unless_gone
from ..openapi import Operation
from ..service import Service
from ..turn import Caller, Turn
from .continuing import ContinuingGenerator
from .replies import OVERLOADED, ReplyBuilder, error_body, error_status, marked_length
from .turns import Asked, asked, conversation
from .wire import CountRequest, Event, MessagesRequest, Ping, Reply, TokenCount

OPERATIONS = (
    Operation(
        "POST",
        "/v1/messages",
        "Create a message, as Anthropic's API does",
        body=MessagesRequest,
        response=Reply,
        errors=(404, 429, 504, OVERLOADED),
        events=Event,
    ),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        "Count the tokens of a message's prompt",
        body=CountRequest,
        response=TokenCount,
        errors=(404,),
    ),
)

_log = logging.getLogger(__name__)


def routes(service: Service) -> list[BaseRoute]:
    """The endpoints of the API."""
    messages = _Messages(service)
    return [
        Route("/v1/messages", messages.create, methods=["POST"]),
        Route("/v1/messages/count_tokens", messages.count, methods=["POST"]),
    ]


class _Messages:
    """Answers requests. Headers of versions and betas are not looked at."""

    def __init__(self, service: Service) -> None:
        self._settings = service.settings
        self._generator = ContinuingGenerator(
            service.broker, service.generator.histories, service.settings.default_tokens
        )

    async def create(self, request: Request) -> Response:
        """A message, whole or as a stream."""
        identifier = f"req_{secrets.token_hex(12)}"
        try:
            body = await read(request, MessagesRequest)
            what = asked(body, _caller(request, body), self._settings.temperature)
            if body.stream:
                generation = await unless_gone(request, lambda: self._start(what.turn))
                return self._stream(what, generation, identifier)
            reply = await unless_gone(request, lambda: self._reply(what))
        except (Gone, ClientDisconnect):
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:
            return _refused(error, identifier)
        return respond(reply, headers=_headers(identifier))

    async def count(self, request: Request) -> Response:
        """The length of a prompt, nothing computed."""
        identifier = f"req_{secrets.token_hex(12)}"
        try:
            body = await read(request, CountRequest)
            turn = Turn(prompt=conversation(body), caller=_caller(request), model=body.model)
            prompt = await self._generator.prompt(turn)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:
            return _refused(error, identifier)
        return respond(TokenCount(len(prompt.tokens)), headers=_headers(identifier))

    async def _start(self, turn: Turn) -> Generation:
        try:
            return await self._generator.start(turn)
        except ContextOverflow as error:
            # The words by which clients know that a conversation has to be made shorter.
            prompt = await self._generator.prompt(turn)
            longest = self._generator.broker.context_of(turn.model) - 1
            if len(prompt.tokens) <= longest:
                raise
            raise invalid(
                f"prompt is too long: {len(prompt.tokens)} tokens > {longest} maximum",
                "messages",
                "context_length_exceeded",
            ) from error

    async def _reply(self, what: Asked) -> Reply:
        async with await self._start(what.turn) as generation:
            builder = _builder(what, generation)
            async for event in generation:
                builder.take(event)
        return builder.reply

    def _stream(self, what: Asked, generation: Generation, identifier: str) -> Response:
        frames = _frames(generation, _builder(what, generation), identifier)
        stream = _MessageStream(
            generation, frames, ping_seconds=self._settings.ping_seconds, ping=_frame(Ping())
        )
        stream.headers.update(_headers(identifier))
        return stream


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


async def _frames(
    generation: Generation, builder: ReplyBuilder, identifier: str
) -> AsyncIterator[bytes]:
    yield _frame(builder.start())
    try:
        async for event in generation:
            for each in builder.take(event):
                yield _frame(each)
    except Exception as error:
        yield frame(error_body(_known(error), identifier), "error")


def _frame(event: Event) -> bytes:
    return frame(event, str(event.__struct_config__.tag))


def _builder(what: Asked, generation: Generation) -> ReplyBuilder:
    prompt = generation.prompt
    identifier = f"msg_{secrets.token_hex(12)}"
    marked = marked_length(prompt, what.marks)
    return ReplyBuilder(identifier, what.turn.model, len(prompt.tokens), marked)


def _caller(request: Request, body: MessagesRequest | None = None) -> Caller:
    metadata = body.metadata if body is not None and body.metadata is not None else {}
    user = metadata.get("user_id")
    if user is not None and not isinstance(user, str):
        raise invalid("metadata.user_id: it must be text", "metadata.user_id")
    return caller(request, user=user, metadata=metadata)


def _refused(error: Exception, identifier: str) -> Response:
    known = _known(error)
    headers = {**_headers(identifier), **known.headers()}
    return respond(error_body(known, identifier), error_status(known), headers)


def _known(error: Exception) -> ApiError:
    if isinstance(error, RecursionError):
        return invalid("the body is nested too deeply")
    known = api_error(error)
    if known.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        _log.error("a request for a message failed", exc_info=error)
    return known


def _headers(identifier: str) -> dict[str, str]:
    return {"request-id": identifier}
