"""What stands in a query string, checked."""

import math

from starlette.requests import Request

from ..errors import invalid

LONGEST_QUOTE = 40


def whole(request: Request, name: str, default: int, low: int, high: int) -> int:
    """A whole number from `low` to `high`; raises `ApiError` for anything else."""
    text = request.query_params.get(name)
    return default if text is None else as_whole(name, text, low, high)


def as_whole(name: str, text: str, low: int, high: int) -> int:
    """Text as a whole number, as in `whole`."""
    is_number = text.isascii() and text.isdigit() and len(text) < 20
    if not is_number or not low <= int(text) <= high:
        found = text[:LONGEST_QUOTE]
        raise invalid(f"{name} is {found!r}; it must be a whole number from {low} to {high}", name)
    return int(text)


def seconds(request: Request, name: str, default: float) -> float:
    """A finite number of seconds; raises `ApiError` for anything else."""
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise invalid(f"{name} is {text[:LONGEST_QUOTE]!r}; it must be in seconds", name)
    return value


def choice(request: Request, name: str, default: str, among: tuple[str, ...]) -> str:
    """One of some words; raises `ApiError` for another one."""
    text = request.query_params.get(name, default)
    if text not in among:
        known = " or ".join(among)
        raise invalid(f"{name} is {text[:LONGEST_QUOTE]!r}; it must be {known}", name)
    return text
