"""What the server answers to, as a table of operations, and as an OpenAPI document of it."""

import re
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from importlib import metadata
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from .bodies import respond
from .entrance.refusals import is_anthropic

SCHEMAS = "#/components/schemas/{name}"
COMMON_ERRORS = (400, 401, 403, 414, 431, 500)
"""Whatever is asked, these may come; with a body, `BODY_ERRORS` too."""

BODY_ERRORS = (408, 413, 503)


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong, in the words of OpenAI's API."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct, frozen=True):
    """The body of every refusal."""

    error: ErrorDetail


class MessagesErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong, in the words of Anthropic's API."""

    type: str
    message: str


class MessagesError(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """The body of every refusal below `/v1/messages`."""

    error: MessagesErrorDetail
    request_id: str


class Operation(NamedTuple):
    """One method of one path, such as ("POST", "/v1/responses").

    What stands in braces in `path` is a parameter of the path; `query` is a Struct whose fields are
    those of the query string. `body` and `response` are Structs, or unions of them; `events` is the
    type of the server-sent events that may come instead of the response, `lines` that of lines of
    JSON. `errors` are the statuses that the operation has beyond those which every one has; those
    in `same_body` come with the body of the response, the others with that of an error.
    """

    method: str
    path: str
    summary: str
    body: object = None
    response: object = None
    status: int = 200
    errors: tuple[int, ...] = ()
    query: object = None
    events: object = None
    lines: object = None
    media_type: str = "application/json"
    same_body: tuple[int, ...] = ()


def openapi_routes(operations: Sequence[Operation]) -> list[BaseRoute]:
    """`/openapi.json`."""
    own = Operation("GET", "/openapi.json", "This document", response=dict[str, Any])
    body = document([*operations, own])

    async def answer(request: Request) -> Response:
        return respond(body)

    return [Route("/openapi.json", answer, methods=["GET"])]


def document(operations: Sequence[Operation]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of some operations."""
    types = _types(operations)
    schemas, components = msgspec.json.schema_components(types, ref_template=SCHEMAS)
    schema_of = _Schemas(types, list(schemas))
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlx-swarm", "version": metadata.version("mlx-swarm")},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


class _Schemas:
    """The schemas of types, which need not be hashable."""

    def __init__(self, types: list[Any], schemas: list[dict[str, Any]]) -> None:
        self._types = types
        self._schemas = schemas

    def __getitem__(self, kind: object) -> dict[str, Any]:
        return self._schemas[self._types.index(kind)]


def _types(operations: Iterable[Operation]) -> list[Any]:
    """The distinct types of all bodies and parameters."""
    types: list[Any] = [Error, MessagesError]
    for each in operations:
        fields = [kind for _, kind, _ in _query(each)]
        for kind in (each.body, each.response, each.events, each.lines, *fields):
            if kind is not None and kind not in types:
                types.append(kind)
    return types


def _operation(each: Operation, schema_of: _Schemas) -> dict[str, Any]:
    told: dict[str, Any] = {
        "summary": each.summary,
        "operationId": _operation_id(each),
        "responses": {str(each.status): _answer(each, schema_of), **_errors(each, schema_of)},
    }
    parameters = _parameters(each, schema_of)
    if parameters:
        told["parameters"] = parameters
    if each.body is not None:
        content = {"application/json": {"schema": schema_of[each.body]}}
        told["requestBody"] = {"required": True, "content": content}
    return told


def _answer(each: Operation, schema_of: _Schemas) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if each.response is not None:
        content[each.media_type] = {"schema": schema_of[each.response]}
    if each.events is not None:
        content["text/event-stream"] = {"x-event": schema_of[each.events]}
    if each.lines is not None:
        content["application/x-ndjson"] = {"x-line": schema_of[each.lines]}
    told: dict[str, Any] = {"description": HTTPStatus(each.status).phrase}
    return {**told, "content": content} if content else told


def _errors(each: Operation, schema_of: _Schemas) -> dict[str, Any]:
    statuses = {*COMMON_ERRORS, *each.errors, *(BODY_ERRORS if each.body is not None else ())}
    error = schema_of[MessagesError if is_anthropic(each.path) else Error]
    told = {}
    for status in sorted(statuses):
        same = status in each.same_body and each.response is not None
        schema = schema_of[each.response] if same else error
        content = {"application/json": {"schema": schema}}
        told[str(status)] = {"description": HTTPStatus(status).phrase, "content": content}
    return told


def _parameters(each: Operation, schema_of: _Schemas) -> list[dict[str, Any]]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", each.path)
    ]
    in_query = [
        {"name": name, "in": "query", "required": required, "schema": schema_of[kind]}
        for name, kind, required in _query(each)
    ]
    return [*in_path, *in_query]


def _query(each: Operation) -> list[tuple[str, Any, bool]]:
    """Name, type and need of each field of the query string."""
    if each.query is None:
        return []
    fields = msgspec.structs.fields(each.query)  # type: ignore[arg-type]
    return [(field.encode_name, field.type, field.required) for field in fields]


def _operation_id(each: Operation) -> str:
    words = re.sub(r"\W+", "_", f"{each.method.lower()}{each.path}")
    return words.strip("_")
