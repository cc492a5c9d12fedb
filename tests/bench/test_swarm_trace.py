"""Shares of the time until the last first token."""

import pytest

from bench.swarm_trace import shares
from mlx_swarm.broker.trace.events import DecodeStep, Event, FirstToken, PrefillChunk, Queued


def queued(at: float) -> Queued:
    return Queued(
        time=at + 0.5,
        submitted=at,
        request="a",
        agent="",
        swarm="",
        namespace="",
        prompt_tokens=1,
        max_tokens=1,
    )


def chunk(at: float, seconds: float, request: str = "a") -> PrefillChunk:
    return PrefillChunk(time=at, seconds=seconds, request=request, start=0, stop=1)


def test_the_time_until_the_last_first_token_is_split() -> None:
    events: list[Event] = [
        queued(10.0),
        queued(9.0),
        chunk(12.0, 1.0),
        DecodeStep(time=13.0, rows=1, seconds=0.5),
        FirstToken(time=13.0, request="a"),
        chunk(15.0, 1.5),
        FirstToken(time=16.0, request="b"),
        DecodeStep(time=17.0, rows=2, seconds=1.0),
        chunk(18.0, 1.0),
    ]
    found = shares(events)
    assert (found.chunks, found.prefill, found.steps, found.decode) == (2, 2.5, 1, 0.5)
    assert found.rest == pytest.approx(4.0)


def test_rows_that_prefill_together_count_once() -> None:
    events = [queued(0.0), chunk(2.0, 1.0), chunk(2.0, 1.0, "b"), chunk(2.5, 1.0, "c")]
    found = shares([*events, FirstToken(time=3.0, request="a")])
    assert (found.chunks, found.prefill, found.rest) == (2, 1.5, 1.5)
