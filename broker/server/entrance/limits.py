"""How large requests may be, in front of the application."""

from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import ApiError, invalid
from .refusals import refusal

MOST_URL_BYTES = 8 << 10
MOST_HEADER_BYTES = 32 << 10
MOST_HEADERS = 128


class Limits:
    """An ASGI application in front of another one, which gets bodies of at most `most` bytes.

    A body that turns out larger raises the `ApiError` for it where the application reads on.
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        error = self._fault(scope)
        if error is not None:
            request_id = scope.get("state", {}).get("request_id", "")
            headers = {} if scope["type"] == "websocket" else {"connection": "close"}
            await refusal(scope["path"], error, request_id, headers)(scope, receive, send)
            return
        bounded = self._bounded(receive) if scope["type"] == "http" else receive
        await self._app(scope, bounded, send)

    def _fault(self, scope: Scope) -> ApiError | None:
        url = len(scope.get("raw_path") or scope["path"]) + len(scope["query_string"])
        if url > MOST_URL_BYTES:
            return ApiError(
                HTTPStatus.REQUEST_URI_TOO_LONG,
                f"the URL has {url:,} bytes; it may have {MOST_URL_BYTES:,}",
            )
        headers = scope["headers"]
        size = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > MOST_HEADERS or size > MOST_HEADER_BYTES:
            return ApiError(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"{len(headers)} headers have {size:,} bytes; there may be {MOST_HEADERS} with "
                f"{MOST_HEADER_BYTES:,}",
            )
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
            return invalid("a body has a content-length or a transfer-encoding, not both")
        told = next((value for name, value in headers if name == b"content-length"), b"0")
        if told.isdigit() and int(told[:20]) > self._most:
            return self._too_large(f"{int(told[:20]):,}")
        return None

    def _bounded(self, receive: Receive) -> Receive:
        taken = 0

        async def bounded() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._most:
                raise self._too_large(f"more than {self._most:,}")
            return message

        return bounded

    def _too_large(self, size: str) -> ApiError:
        return ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body has {size} bytes; this server takes {self._most:,}",
            code="request_too_large",
        )
