"""Trace events: every one survives the file format, and readers outlive additions to it."""

import subprocess
import sys
from typing import get_args

import msgspec
import pytest

from mlx_swarm.broker.trace import events
from mlx_swarm.broker.trace.events import (
    Admitted,
    Cancelled,
    DecodeStep,
    Deferred,
    Demoted,
    Displaced,
    Divergence,
    Event,
    Evicted,
    Failed,
    Finished,
    FirstToken,
    Held,
    ModelLoaded,
    ModelUnloaded,
    PinRefused,
    Planned,
    Preempted,
    PrefillChunk,
    Pressure,
    Put,
    Quarantined,
    Queued,
    Restored,
    Resumed,
    Shared,
    Spilled,
    Split,
    TraceEvent,
    TraceStarted,
    Waiting,
    decode,
    encode,
    miss_reasons,
)

EXAMPLES: list[Event] = [
    TraceStarted(time=0.0, version=1, wall_time=1.7e9, model="tiny", backend="cpu"),
    Queued(
        time=0.5,
        submitted=0.25,
        request="r1",
        agent="editor",
        swarm="swarm",
        namespace="n",
        prompt_tokens=9,
        max_tokens=4,
        tenant="house",
        priority=-1,
        deadline=2.5,
        others=3,
    ),
    Waiting(time=0.5, request="r2", leader="r1", shared_tokens=8),
    Held(time=0.5, request="r3", need=4096, available=512, others=2),
    Deferred(time=0.5, request="r3", need=4096, held=8192, budget=10240),
    Displaced(time=0.5, agent="a3", swarm="s", tenant="t", request="r3"),
    PinRefused(time=0.5, agent="a3", swarm="s", tenant="t", error="CacheError: too much"),
    Admitted(
        time=0.55,
        request="r1",
        seconds=0.05,
        priority=-1,
        tenant_tokens=900,
        swarm_tokens=500,
        agent_tokens=80,
        others=2,
    ),
    Preempted(
        time=0.35, request="r-1", by="r-2", reason="slice", output_tokens=5, kept_tokens=1024
    ),
    Resumed(
        time=0.36,
        request="r-1",
        output_tokens=5,
        ram_tokens=1024,
        cold_tokens=0,
        prefilled_tokens=1,
        reason=None,
    ),
    Planned(
        time=0.6,
        request="r1",
        prompt_tokens=9,
        ram_tokens=4,
        cold_tokens=0,
        prefilled_tokens=5,
        donor="e1",
        reason="diverged",
        divergence=Divergence(index=4, stored=7, wanted=11),
    ),
    PrefillChunk(time=0.7, request="r1", start=4, stop=9, seconds=0.1),
    FirstToken(time=0.8, request="r1"),
    DecodeStep(time=0.9, rows=3, seconds=0.02),
    Shared(time=0.9, rows=3, spans=((1024, 3), (64, 2)), model="llama"),
    Put(time=1.0, entry="e2", namespace="n", tokens=12, new_tokens=8, bytes=512, request="r1"),
    Split(time=1.0, entry="e1", namespace="n", at=4),
    Evicted(time=1.1, entry="e1", namespace="n", tokens=4, bytes=256),
    Spilled(time=1.2, entry="e1", namespace="n", tokens=4, bytes=256, seconds=0.1),
    Demoted(time=1.2, entry="e1", namespace="n", tokens=4, bytes=256),
    Restored(time=1.3, entry="e1", namespace="n", tokens=4, length=9, bytes=256, seconds=0.1),
    Quarantined(time=1.3, entry="e1", namespace="n", bytes=9, error="block 0 has a wrong checksum"),
    Pressure(
        time=1.3,
        level="soft",
        before="normal",
        active=700,
        pool=0,
        footprint=920,
        limit=1000,
        cache=300,
    ),
    ModelLoaded(time=1.4, model="legal", base="llama", weights=900, seconds=0.5),
    ModelUnloaded(time=1.5, model="legal", reason="idle"),
    Finished(time=1.2, request="r1", finish_reason="stop", output_tokens=4),
    Cancelled(time=1.3, request="r2", output_tokens=1, kept_tokens=9),
    Failed(time=1.4, request="r3", error="EngineFailed: a step failed"),
]


def test_there_is_an_example_of_every_event() -> None:
    assert {type(example) for example in EXAMPLES} == set(get_args(TraceEvent))


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: type(event).__name__)
def test_an_event_survives_the_file_format(event: Event) -> None:
    line = encode(event)
    assert b"\n" not in line
    assert decode(line) == event


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: type(event).__name__)
def test_a_field_added_by_a_later_release_is_tolerated(event: Event) -> None:
    fields = msgspec.json.decode(encode(event))
    assert decode(msgspec.json.encode(fields | {"added_later": [1, 2]})) == event


@pytest.mark.parametrize("line", [b"", b"[]", b'{"event":"Unheard"}', b'{"event":"FirstToken"}'])
def test_what_is_no_event_is_a_typed_error(line: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode(line)


def test_events_are_frozen() -> None:
    with pytest.raises(AttributeError):
        EXAMPLES[0].time = 1.0  # type: ignore[misc]


def test_every_reason_can_be_recorded() -> None:
    assert "diverged" in miss_reasons()
    assert len(set(miss_reasons())) == len(miss_reasons()) == 11


def test_traces_are_read_without_mlx() -> None:
    program = (
        f"import sys, {events.__name__}, mlx_swarm.broker.trace.recorder; "
        "sys.exit(any(name.split('.')[0] in ('mlx', 'mlx_lm') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
