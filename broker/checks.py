"""Checks of what users hand in: what is wrong is an `InvalidRequest` of one line. No MLX."""

import math
from typing import Any

from .errors import InvalidRequest

LONGEST_QUOTE = 60


def check_kind(name: str, value: Any, kind: type, wanted: str) -> None:
    """Raise unless `value` is a `kind`; a bool counts as nothing but a bool."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise InvalidRequest(f"{name} is {_quoted(value)}; it must be {wanted}")


def check_whole(name: str, value: Any, lowest: int, meaning: str) -> None:
    """Raise unless `value` is an int of at least `lowest`."""
    check_kind(name, value, int, "a whole number")
    if value < lowest:
        raise InvalidRequest(f"{name} is {value}; it must be {meaning}")


def check_range(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    """Raise unless `value` is a finite number in [low, high], or (low, high] with `open_low`."""
    if not is_number(value):
        raise InvalidRequest(f"{name} is {_quoted(value)}; it must be a number")
    inside = low <= value <= high and not (open_low and value == low)
    if not inside or not math.isfinite(value):
        bracket = "(" if open_low else "["
        raise InvalidRequest(f"{name} is {value}; it must be in {bracket}{low:g}, {high:g}]")


def is_number(value: Any) -> bool:
    """Whether it is a number; a bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_wait(name: str, value: Any) -> None:
    """Raise unless `value` is a number of seconds from 0 on, or inf for ever."""
    if not is_number(value) or not value >= 0:
        raise InvalidRequest(f"{name} is {_quoted(value)}; it must be seconds, 0 or more, or inf")


def check_text(name: str, value: Any) -> None:
    """Raise unless `value` is text that can be written as UTF-8."""
    check_kind(name, value, str, "text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{name} has half a character at position {error.start}: {_quoted(value[error.start])} "
            "is a lone surrogate"
        ) from None


def check_sized(name: str, value: Any) -> None:
    """Raise unless `value` has a length, as lists, tuples and arrays have."""
    try:
        len(value)
    except TypeError:
        raise InvalidRequest(f"{name} is {_quoted(value)}; it must be a list") from None


def _quoted(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}…"
