"""`/v1/models`: the models that requests can name."""

from http import HTTPStatus
from typing import Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ...request import ModelInfo
from ..bodies import respond
from ..errors import ApiError
from ..openapi import Operation
from ..service import Service


class ModelBody(Struct, frozen=True, kw_only=True):
    """A model under one of its names. `base` is what it is an adapter of; one that is not `loaded`
    will be by the next request to it.
    """

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "mlx-swarm"
    context_length: int
    aliases: tuple[str, ...]
    base: str | None
    loaded: bool


class ModelList(Struct, frozen=True, kw_only=True):
    """All of them, the one first that is meant where none is named."""

    object: Literal["list"] = "list"
    data: tuple[ModelBody, ...]


OPERATIONS = (
    Operation("GET", "/v1/models", "The models that requests can name", response=ModelList),
    Operation("GET", "/v1/models/{model}", "One of them", response=ModelBody, errors=(404,)),
)


def routes(service: Service) -> list[BaseRoute]:
    """The list, and each by its name or one of its aliases."""

    async def listed(request: Request) -> Response:
        found = await service.broker.models()
        return respond(ModelList(data=tuple(_model(each, each.name) for each in found)))

    async def one(request: Request) -> Response:
        name = request.path_params["model"]
        for each in await service.broker.models():
            if name in (each.name, *each.aliases):
                return respond(_model(each, name))
        message = f"no model {name[:200]!r} is loaded"
        raise ApiError(HTTPStatus.NOT_FOUND, message, code="model_not_found", param="model")

    return [
        Route("/v1/models", listed, methods=["GET"]),
        Route("/v1/models/{model:path}", one, methods=["GET"]),
    ]


def _model(info: ModelInfo, name: str) -> ModelBody:
    return ModelBody(
        id=name,
        context_length=info.context_length,
        aliases=info.aliases,
        base=info.base or None,
        loaded=info.loaded,
    )
