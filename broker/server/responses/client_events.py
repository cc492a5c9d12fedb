"""What a client says over a WebSocket: one JSON object a message, told apart by its `type`."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from ..bodies import decode
from .wire import CreateResponse

Name = Annotated[str, Meta(max_length=256)]


class Head(Struct, frozen=True):
    """What all events have. Without a `stream_id` it is for the default lane."""

    type: str
    stream_id: Name | None = None


class Cancel(Struct, frozen=True):
    """End a response, or what a lane is at."""

    response_id: str | None = None
    stream_id: Name | None = None


class Subscribe(Struct, frozen=True):
    """Have events sent that OpenAI does not have, of the connection's requests or the tenant's."""

    events: list[Literal["trace", "statistics"]]
    scope: Literal["connection", "tenant"] = "connection"


class Unsubscribe(Struct, frozen=True):
    """Have them sent no more; by default none of them."""

    events: list[Literal["trace", "statistics"]] | None = None


class Resume(Struct, frozen=True):
    """Have the events of a response sent again, those after a number, and then those to come."""

    response_id: str
    starting_after: Annotated[int, Meta(ge=-1)] = -1


class _Nested(Struct, frozen=True):
    response: msgspec.Raw = msgspec.Raw()


def decode_create(text: str) -> CreateResponse:
    """The body of `response.create`, whether it is flat in the event or under `response`."""
    nested = bytes(decode(_Nested, text).response)
    return decode(CreateResponse, nested or text)
