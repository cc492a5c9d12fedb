"""Bodies of requests and responses: msgspec in, msgspec out, with the field that is wrong."""

import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .errors import ApiError, invalid

Body = TypeVar("Body")

_ENCODER = msgspec.json.Encoder()
_MISSING = re.compile(r"missing required field `(?P<field>[^`]*)`")
_AT = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")


def decode(kind: type[Body], data: bytes | str) -> Body:
    """A body as a `kind`. Unknown fields are left out; raises `ApiError` naming a wrong one."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise wrong_field(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {error}") from error


def convert(kind: type[Body], data: Any) -> Body:
    """What was decoded already as a `kind`; raises like `decode`."""
    try:
        return msgspec.convert(data, type=kind)
    except msgspec.ValidationError as error:
        raise wrong_field(error) from error


def wrong_field(error: msgspec.ValidationError) -> ApiError:
    """What msgspec refused, with the path of the field apart."""
    found, missing = _AT.search(str(error)), _MISSING.search(str(error))
    if found is None:
        return invalid(str(error), missing["field"] if missing else None)
    path = found["path"].lstrip(".") or None
    if missing is not None:
        path = f"{path}.{missing['field']}" if path else missing["field"]
    return invalid(f"{path or 'the body'}: {str(error)[: found.start()]}", path)


async def read(request: Request, kind: type[Body]) -> Body:
    """The body of an HTTP request."""
    return decode(kind, await request.body())


def encode(body: object) -> bytes:
    """A body as JSON."""
    return _ENCODER.encode(body)


def respond(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An HTTP response of JSON."""
    return Response(encode(body), status, headers, media_type="application/json")
