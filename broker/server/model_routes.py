"""`/v1/models`: the models that requests can name."""

from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..request import ModelInfo
from .bodies import respond
from .errors import ApiError
from .guarded import guarded
from .service import Service

OWNER = "mlx-swarm"


def routes(service: Service) -> list[BaseRoute]:
    """The list, and each by its name or one of its aliases."""

    async def listed(request: Request) -> Response:
        models = await service.broker.models()
        return respond({"object": "list", "data": [_model(each, each.name) for each in models]})

    async def one(request: Request) -> Response:
        name = request.path_params["model"]
        for each in await service.broker.models():
            if name in (each.name, *each.aliases):
                return respond(_model(each, name))
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            f"no model {name[:200]!r} is loaded",
            code="model_not_found",
            param="model",
        )

    return [
        Route("/v1/models", guarded(listed), methods=["GET"]),
        Route("/v1/models/{model:path}", guarded(one), methods=["GET"]),
    ]


def _model(info: ModelInfo, name: str) -> object:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": OWNER,
        "context_length": info.context_length,
        "max_model_len": info.context_length,
        "aliases": info.aliases,
        "base": info.base or None,
        "parent": info.base or None,
        "loaded": info.loaded,
    }
