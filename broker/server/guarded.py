"""Endpoints that answer with one JSON body, or with the error that there was."""

import logging
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from .errors import ApiError, api_error
from .http import refuse

Endpoint = Callable[[Request], Awaitable[Response]]

_log = logging.getLogger(__name__)


def guarded(endpoint: Endpoint) -> Endpoint:
    """The endpoint, whose errors are answered in OpenAI's form."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except Exception as error:
            known = api_error(error)
            if known.code == "internal_error":
                _log.exception("%s %s failed", request.method, request.url.path)
            return refuse(known, error_body)

    return answer


def error_body(error: ApiError) -> object:
    """An error as OpenAI writes it."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }
