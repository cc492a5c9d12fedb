"""Errors as the two families of APIs write them: everything that is refused is JSON."""

import secrets
from typing import Any

from starlette.responses import Response

from ..bodies import respond
from ..errors import ApiError

ANTHROPIC = "/v1/messages"
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(path: str, error: ApiError, request_id: str = "") -> dict[str, Any]:
    """The body of an error under a path: Anthropic's below `/v1/messages`, OpenAI's elsewhere."""
    if is_anthropic(path):
        default = "api_error" if error.status >= 500 else "invalid_request_error"
        kind = ANTHROPIC_TYPES.get(error.status, default)
        told = {"type": kind, "message": error.message}
        return {"type": "error", "error": told, "request_id": request_id or new_request_id()}
    told_openai = {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
    }
    return {"error": told_openai}


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path == ANTHROPIC or path.startswith(f"{ANTHROPIC}/")


def refusal(
    path: str, error: ApiError, request_id: str = "", headers: dict[str, str] | None = None
) -> Response:
    """The response that carries an error under a path. Also refuses WebSockets before they open."""
    body = error_body(path, error, request_id)
    return respond(body, error.status, {**error.headers(), **(headers or {})})


def new_request_id() -> str:
    """A name for one request, which no other has."""
    return f"req_{secrets.token_hex(12)}"
