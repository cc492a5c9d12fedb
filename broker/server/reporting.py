"""The server's log of errors that nobody foresaw, without a word of what a user wrote."""

import logging
import traceback

LOGGER = logging.getLogger("mlx_swarm.server")


def report(what: str, error: BaseException) -> None:
    """Log the type of an error and where it was raised: its message may quote a user."""
    places = [
        f"{frame.filename}:{frame.lineno} in {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    LOGGER.error("%s failed with %s\n  %s", what, type(error).__qualname__, "\n  ".join(places))
