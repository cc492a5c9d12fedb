"""`/tokenize` and `/detokenize`: between text, messages and the tokens of a model."""

from anyio import to_thread
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ...request import check_messages, check_tools
from ..bodies import read, respond
from ..openapi import Operation
from ..service import Service
from ..turns.turn import Conversation
from .prompts import PromptBody, TokenId


class TokenizeBody(PromptBody, kw_only=True):
    """With `pieces` every token comes with its text."""

    pieces: bool = False
    add_generation_prompt: bool = True


class Tokenized(Struct, frozen=True, kw_only=True):
    """Tokens, the text that they are of, and up to where other prompts are likely to agree."""

    tokens: tuple[int, ...]
    count: int
    context_length: int
    text: str
    boundaries: tuple[int, ...] = ()
    pieces: tuple[str, ...] | None = None


class DetokenizeBody(Struct, kw_only=True):
    """Tokens of a model."""

    tokens: list[TokenId]
    model: str = ""


class Detokenized(Struct, frozen=True, kw_only=True):
    """The text of tokens, special ones included."""

    text: str
    count: int


OPERATIONS = (
    Operation(
        "POST",
        "/tokenize",
        "Text, or messages and tools, as tokens",
        body=TokenizeBody,
        response=Tokenized,
        errors=(404,),
    ),
    Operation(
        "POST",
        "/detokenize",
        "Tokens as text",
        body=DetokenizeBody,
        response=Detokenized,
        errors=(404,),
    ),
)


def routes(service: Service) -> list[BaseRoute]:
    """Both."""

    async def tokenize(request: Request) -> Response:
        return respond(await _tokenized(service, await read(request, TokenizeBody)))

    async def detokenize(request: Request) -> Response:
        body = await read(request, DetokenizeBody)
        text = await service.broker.decode(body.tokens, model=body.model)
        return respond(Detokenized(text=text, count=len(body.tokens)))

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]


async def _tokenized(service: Service, body: TokenizeBody) -> Tokenized:
    broker, given = service.broker, body.given()
    boundaries: tuple[int, ...] = ()
    chat = broker.chat_format(body.model)
    if isinstance(given, Conversation):
        check_messages(given.messages)
        check_tools(given.tools)
        tokens, boundaries, text = await to_thread.run_sync(
            lambda: chat.render(
                given.messages, given.tools, add_generation_prompt=body.add_generation_prompt
            )
        )
    elif isinstance(given, str):
        tokens, text = await broker.encode(given, model=body.model), given
    else:
        tokens, text = list(given), await broker.decode(given, model=body.model)
    pieces: tuple[str, ...] | None = None
    if body.pieces:
        pieces = await to_thread.run_sync(lambda: tuple(chat.decode([each]) for each in tokens))
    return Tokenized(
        tokens=tuple(tokens),
        count=len(tokens),
        context_length=broker.context_of(body.model),
        text=text,
        boundaries=boundaries,
        pieces=pieces,
    )
