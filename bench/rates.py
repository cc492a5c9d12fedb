"""Rates of generation, from when tokens arrived at whoever asked for them."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class Arrival(NamedTuple):
    """Tokens of a row that arrived together, `seconds` after the rows were submitted."""

    row: int
    seconds: float
    tokens: int = 1


def prefill_rate(prompt_tokens: int, arrivals: Sequence[Arrival]) -> float:
    """Prompt tokens a second until the last row's first token."""
    return prompt_tokens / max(_first_arrivals(arrivals).values())


def decode_rate(arrivals: Sequence[Arrival]) -> float:
    """Tokens a second of all rows while all of them decode.

    From the moment when every row has begun until the first one is finished. Raises `ValueError` if
    there is no such time.
    """
    start = max(_first_arrivals(arrivals).values())
    ends = {arrival.row: arrival.seconds for arrival in arrivals}
    end = min(ends.values())
    tokens = sum(arrival.tokens for arrival in arrivals if start < arrival.seconds <= end)
    if not tokens:
        totals = Counter[int]()
        for arrival in arrivals:
            totals[arrival.row] += arrival.tokens
        raise ValueError(
            f"{len(ends)} rows of {min(totals.values())} to {max(totals.values())} tokens were "
            "never decoded side by side: ask for more output tokens"
        )
    return tokens / (end - start)


def job_rate(arrivals: Sequence[Arrival]) -> float:
    """Output tokens a second of all rows, from their submission to the last token."""
    return sum(arrival.tokens for arrival in arrivals) / arrivals[-1].seconds


def _first_arrivals(arrivals: Sequence[Arrival]) -> dict[int, float]:
    first: dict[int, float] = {}
    for arrival in arrivals:
        first.setdefault(arrival.row, arrival.seconds)
    return first
