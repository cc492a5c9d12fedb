"""What the server answers to, as a table of operations, and as an OpenAPI document of it."""

from typing import NamedTuple


class Operation(NamedTuple):
    """One method of one path, such as ("POST", "/v1/responses").

    What stands in braces in `path` is a parameter of the path; `query` is a Struct whose fields are
    those of the query string. `body` and `response` are Structs, or unions of them; `events` is the
    type of the server-sent events that may come instead of the response. `errors` are the statuses
    that the operation has beyond those which every one has.
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
    media_type: str = "application/json"
