"""What goes wrong, as the APIs report it: a status, a type, a code, the field and a message."""

from collections.abc import Mapping
from http import HTTPStatus

import anyio

from ..errors import (
    BrokerClosed,
    ContextOverflow,
    DeadlineExceeded,
    InvalidRequest,
    ModelBusy,
    ModelNotFound,
    OutOfMemory,
    QueueFull,
    SwarmError,
)

RETRY_SECONDS = 2
CHAT_NAMES = {"tokens": "messages", "json_schema": "response_format", "lark": "tools"}


class ApiError(SwarmError):
    """An error for whoever called an API.

    `type` and `code` are OpenAI's words; Anthropic's follow from `status` and `code`. `param` names
    the field that is wrong. `retry_after`, in seconds, goes into the header of that name.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.retry_after = retry_after

    def headers(self) -> dict[str, str]:
        """Headers of the HTTP response that carries it."""
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that is wrong, and in which field."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def api_error(error: BaseException, names: Mapping[str, str] = CHAT_NAMES) -> ApiError:
    """Any error of the broker as an API reports it. What nobody foresaw tells nothing but that.

    `names` are those of the API for what `InvalidRequest.field` calls otherwise.
    """
    match error:
        case ApiError():
            return error
        case ContextOverflow():
            return invalid(str(error), names.get("tokens"), "context_length_exceeded")
        case ModelNotFound():
            return ApiError(HTTPStatus.NOT_FOUND, str(error), code="model_not_found", param="model")
        case InvalidRequest():
            return invalid(str(error), names.get(error.field or "", error.field))
        case QueueFull():
            return ApiError(
                HTTPStatus.TOO_MANY_REQUESTS,
                str(error),
                type="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after=RETRY_SECONDS,
            )
        case DeadlineExceeded() | TimeoutError():
            return ApiError(
                HTTPStatus.GATEWAY_TIMEOUT, str(error), type="server_error", code="timeout"
            )
        case OutOfMemory() | BrokerClosed() | ModelBusy() | anyio.ClosedResourceError():
            return ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                str(error),
                type="server_error",
                code="overloaded",
                retry_after=RETRY_SECONDS,
            )
        case SwarmError():
            return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, str(error), type="server_error")
    return ApiError(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "the server failed to answer; its log says why",
        type="server_error",
        code="internal_error",
    )
