"""The endpoint of chat completions."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..bodies import read
from ..openai_fields import caller_fields
from ..openapi import Operation
from ..service import Service
from ..turns.answering import answered, streamed_answer, whole_answer
from ..turns.callers import caller
from ..turns.token_texts import TokenTexts
from .objects import ChatCompletion, Chunk
from .replies import Answer, Asked
from .turns import speaks_functions, turns_of
from .wire import ChatBody

OPERATIONS = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "Continue a conversation",
        body=ChatBody,
        response=ChatCompletion,
        events=Chunk,
        errors=(404, 429, 503, 504),
    ),
)


def routes(service: Service) -> list[BaseRoute]:
    """`POST /v1/chat/completions`."""

    async def create(request: Request) -> Response:
        body = await read(request, ChatBody)
        turns = turns_of(body, caller(request, **caller_fields(body)), service.settings)
        answer = Answer(
            Asked(
                model=body.model or service.broker.model_name,
                choices=len(turns),
                logprobs=bool(body.logprobs),
                usage=body.wants_usage,
                functions=speaks_functions(body),
            ),
            TokenTexts(service.broker.chat_format(body.model or "")),
        )
        if body.stream:
            return await streamed_answer(request, service, turns, answer.chunks)
        return await whole_answer(request, service.generator, turns, answer.whole)

    return [Route("/v1/chat/completions", answered(create), methods=["POST"])]
