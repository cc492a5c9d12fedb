"""The endpoint of completions."""

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
from .replies import Answer, Asked
from .turns import prompts_of, turns_of
from .wire import Completion, CompletionBody

NAMES = {"tokens": "prompt"}

OPERATIONS = (
    Operation(
        "POST",
        "/v1/completions",
        "Continue texts",
        body=CompletionBody,
        response=Completion,
        events=Completion,
        errors=(404, 429, 503, 504),
    ),
)


def routes(service: Service) -> list[BaseRoute]:
    """`POST /v1/completions`."""

    async def create(request: Request) -> Response:
        body = await read(request, CompletionBody)
        turns = turns_of(body, caller(request, **caller_fields(body)), service.settings)
        answer = Answer(
            Asked(
                model=body.model or service.broker.model_name,
                prompts=prompts_of(body),
                choices=body.choices(),
                echo=bool(body.echo),
                logprobs=body.logprobs is not None,
                usage=body.wants_usage,
                generate=body.max_tokens != 0,
            ),
            TokenTexts(service.broker.chat_format(body.model or "")),
        )
        if body.stream:
            return await streamed_answer(request, service, turns, answer.chunks)
        return await whole_answer(request, service.generator, turns, answer.whole)

    return [Route("/v1/completions", answered(create, NAMES), methods=["POST"])]
