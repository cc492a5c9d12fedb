"""Where the time until the last first token goes, from the trace of a broker."""

from collections.abc import Iterable, Sequence

from bench.swarm_findings import Shares
from mlx_swarm.broker.trace.events import DecodeStep, Event, FirstToken, PrefillChunk, Queued

Interval = tuple[float, float]


def shares(events: Sequence[Event]) -> Shares:
    """From the first submission to the last first token of these events."""
    start = min(event.submitted for event in events if isinstance(event, Queued))
    stop = max(event.time for event in events if isinstance(event, FirstToken))
    chunks = _intervals(events, PrefillChunk, stop)
    steps = _intervals(events, DecodeStep, stop)
    prefill, decode = _covered(chunks), _covered(steps)
    return Shares(
        chunks=len(chunks),
        prefill=prefill,
        steps=len(steps),
        decode=decode,
        rest=max(0.0, stop - start - prefill - decode),
    )


def _intervals(
    events: Iterable[Event], kind: type[PrefillChunk] | type[DecodeStep], stop: float
) -> list[Interval]:
    """When these took place; what several rows did together counts once."""
    found = {
        (round(event.time - event.seconds, 6), round(event.time, 6))
        for event in events
        if isinstance(event, kind) and event.time <= stop
    }
    return sorted(found)


def _covered(intervals: Iterable[Interval]) -> float:
    """Seconds that lie in at least one of some intervals, which are in order of their begin."""
    total, reached = 0.0, float("-inf")
    for start, stop in intervals:
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total
