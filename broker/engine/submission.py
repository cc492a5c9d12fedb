"""A request on its way into the engine. No MLX."""

from typing import NamedTuple

from ..request import Request, RequestId
from .mailbox import Mailbox

MAX_QUEUE = 1024
"""Requests that may wait while `max_rows` others run."""


class Submission(NamedTuple):
    """What the event loop hands to the engine. `submitted` is on the recorder's clock."""

    id: RequestId
    request: Request
    mailbox: Mailbox
    submitted: float
