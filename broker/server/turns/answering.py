"""Answering with one body or a stream of chunks, for APIs in which a request has choices."""

import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..bodies import respond
from ..errors import CHAT_NAMES, ApiError, api_error
from ..http import CLIENT_CLOSED_REQUEST, EventStream, Gone, frame, refuse, unless_gone
from ..openai_fields import error_body
from ..service import Service
from .choices import Choices, Events
from .generation import Generator
from .turn import Turn

DONE = b"data: [DONE]\n\n"

Endpoint = Callable[[Request], Awaitable[Response]]
Chunks = Callable[[Events], AsyncIterator[object]]
Whole = Callable[[Events], Awaitable[object]]

_log = logging.getLogger(__name__)


def answered(endpoint: Endpoint, names: Mapping[str, str] = CHAT_NAMES) -> Endpoint:
    """The endpoint, whose errors are answered in OpenAI's form; `names` as in `api_error`."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except (Gone, ClientDisconnect):
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:
            return refuse(_known(error, names), error_body)

    return answer


async def whole_answer(
    request: Request, generator: Generator, turns: Sequence[Turn], whole: Whole
) -> Response:
    """What `whole` makes of the events of all turns. Raises `Gone` if the client goes before."""

    async def work() -> object:
        async with await Choices.start(generator, turns) as choices:
            return await choices.read(whole)

    return respond(await unless_gone(request, work))


async def streamed_answer(
    request: Request, service: Service, turns: Sequence[Turn], chunks: Chunks
) -> Response:
    """What `chunks` makes of the events of all turns, as it comes.

    What refuses a turn is raised here, before anything is sent. Raises `Gone` likewise.
    """
    choices = await unless_gone(request, partial(Choices.start, service.generator, turns))
    return ChunkStream(choices, chunks, service.settings.ping_seconds)


class ChunkStream(Response):
    """The `chunks` of started choices as server-sent events, and at the end that it is done.

    An error on the way is the last event. Nothing runs any more when this has been sent, or could
    not be.
    """

    def __init__(self, choices: Choices, chunks: Chunks, ping_seconds: float) -> None:
        super().__init__()
        self._choices = choices
        self._chunks = chunks
        self._ping_seconds = ping_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything."""

        async def serve(events: Events) -> None:
            stream = EventStream(self._frames(events), ping_seconds=self._ping_seconds)
            await stream(scope, receive, send)

        async with self._choices:
            await self._choices.read(serve)

    async def _frames(self, events: Events) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._chunks(events):
                yield frame(chunk)
        except Exception as error:
            yield frame(error_body(_known(error)))
        else:
            yield DONE


def _known(error: Exception, names: Mapping[str, str] = CHAT_NAMES) -> ApiError:
    """The error as it is told. The log has what nobody foresaw, without the message: it may quote
    what a user wrote.
    """
    known = api_error(error, names)
    if known.code == "internal_error":
        raised = traceback.extract_tb(error.__traceback__)[-1]
        kind = type(error).__name__
        _log.error("a request failed: %s in %s, line %s", kind, raised.filename, raised.lineno)
    return known
