"""`/tokenize` and `/detokenize`: between text, messages and the tokens of a model."""

from typing import Any

from anyio import to_thread
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from .bodies import read, respond
from .guarded import guarded
from .prompts import PromptBody, TokenId
from .service import Service
from .turn import Conversation


class TokenizeBody(PromptBody, kw_only=True):
    """With `pieces` every token comes with its text."""

    pieces: bool = False
    return_token_strs: bool = False
    add_generation_prompt: bool = True


class DetokenizeBody(Struct, kw_only=True):
    tokens: list[TokenId]
    model: str = ""


def routes(service: Service) -> list[BaseRoute]:
    """Both, with and without `/v1`."""

    async def tokenize(request: Request) -> Response:
        return respond(await _tokenized(service, await read(request, TokenizeBody)))

    async def detokenize(request: Request) -> Response:
        body = await read(request, DetokenizeBody)
        text = await service.broker.decode(body.tokens, model=body.model)
        return respond({"prompt": text, "text": text, "count": len(body.tokens)})

    return [
        Route(f"{prefix}/{endpoint.__name__}", guarded(endpoint), methods=["POST"])
        for prefix in ("", "/v1")
        for endpoint in (tokenize, detokenize)
    ]


async def _tokenized(service: Service, body: TokenizeBody) -> dict[str, Any]:
    broker, given = service.broker, body.given()
    chat = broker.chat_format(body.model)
    answer: dict[str, Any] = {}
    if isinstance(given, Conversation):
        rendered = await to_thread.run_sync(
            lambda: chat.render(
                given.messages, given.tools, add_generation_prompt=body.add_generation_prompt
            )
        )
        tokens = rendered.tokens
        answer |= {"text": rendered.text, "boundaries": rendered.boundaries}
    elif isinstance(given, str):
        tokens = await broker.encode(given, model=body.model)
    else:
        tokens = list(given)
    answer |= {
        "tokens": tokens,
        "count": len(tokens),
        "max_model_len": broker.context_of(body.model),
    }
    if body.pieces or body.return_token_strs:
        pieces = await to_thread.run_sync(lambda: [chat.decode([each]) for each in tokens])
        answer |= {"pieces": pieces, "token_strs": pieces}
    return answer
