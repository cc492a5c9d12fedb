"""What a tenant sees of a trace, and what is gone of it."""

from collections.abc import Sequence

from mlx_swarm.broker.server.admin.trace_feed import Feed, Query
from mlx_swarm.broker.server.admin.visibility import Sight
from mlx_swarm.broker.trace import events
from mlx_swarm.broker.trace.events import Event
from mlx_swarm.broker.trace.recorder import Recorder

ALL = Query(since=0, time=float("-inf"), limit=10, follow=False, as_json=False)


def queued(request: str, tenant: str) -> events.Queued:
    return events.Queued(
        time=0.0,
        submitted=0.0,
        request=request,
        agent="agent",
        swarm="",
        namespace=f"namespace of {tenant}",
        prompt_tokens=1,
        max_tokens=1,
        tenant=tenant,
    )


def planned(request: str, reason: events.MissReason) -> events.Planned:
    return events.Planned(
        time=0.0,
        request=request,
        prompt_tokens=1,
        ram_tokens=0,
        cold_tokens=0,
        prefilled_tokens=1,
        donor=None,
        reason=reason,
    )


def put(tenant: str) -> events.Put:
    return events.Put(
        time=0.0, entry="e", namespace=f"namespace of {tenant}", tokens=1, new_tokens=1, bytes=1
    )


HAPPENED: Sequence[Event] = (
    queued("r1", "a"),
    queued("r2", "b"),
    planned("r1", "namespace"),
    planned("r2", "cold_start"),
    events.Preempted(
        time=0.0, request="r1", by="r2", reason="slice", output_tokens=1, kept_tokens=1
    ),
    events.Displaced(time=0.0, agent="x", swarm="", tenant="a", request="r2"),
    events.Displaced(time=0.0, agent="y", swarm="", tenant="b", request="r1"),
    events.PinRefused(time=0.0, agent="y", swarm="", tenant="b", error="full"),
    put("a"),
    put("b"),
    events.DecodeStep(time=0.0, rows=2, seconds=0.1),
    events.ModelUnloaded(time=0.0, model="m", reason="idle"),
    events.Finished(time=0.0, request="r2", finish_reason="stop", output_tokens=1),
)


def seen(sight: Sight, happened: Sequence[Event] = HAPPENED) -> list[Event]:
    return [event for event in map(sight.see, happened) if event is not None]


def test_everything_is_seen_where_nobody_is_told_apart() -> None:
    assert seen(Sight(None)) == list(HAPPENED)


def test_a_tenant_sees_its_own_and_nothing_of_others() -> None:
    found = seen(Sight("a"))
    assert [type(each).__name__ for each in found] == [
        "Queued",
        "Planned",
        "Preempted",
        "Displaced",
        "Put",
    ]
    told = repr(found)
    assert "r2" not in told
    assert "of b" not in told
    assert "'namespace'" not in told


def test_the_tenant_of_no_name_is_one_like_others_once_there_are_keys() -> None:
    assert not seen(Sight(""))
    assert len(seen(Sight("", ["namespace of b"]))) == 1


def test_what_left_the_ring_is_counted_once() -> None:
    with Recorder(capacity=4) as recorder:
        for number in range(6):
            recorder.emit(queued(f"r{number}", ""))
        feed = Feed(recorder, Sight(None), ALL)
        assert [number for number, _ in feed.read()] == [3, 4, 5, 6]
        assert feed.take_dropped() == 2
        for number in range(6, 15):
            recorder.emit(queued(f"r{number}", ""))
        assert [number for number, _ in feed.read(2)] == [12, 13]
        assert [number for number, _ in feed.read()] == [14, 15]
        assert feed.take_dropped() == 5
        assert feed.read() == []
        assert feed.take_dropped() == 0


def test_nothing_is_missed_of_what_was_not_asked_for() -> None:
    with Recorder(capacity=4) as recorder:
        for number in range(6):
            recorder.emit(queued(f"r{number}", ""))
        late = Feed(recorder, Sight(None), ALL._replace(since=4))
        assert [number for number, _ in late.read()] == [5, 6]
        assert late.dropped == 0
        latest = Feed(recorder, Sight(None), ALL._replace(since=None))
        assert len(latest.read()) == 4
        assert latest.dropped == 0


def test_a_tail_of_the_ring() -> None:
    with Recorder(capacity=4) as recorder:
        assert recorder.since(5) == (0, [], 0)
        for number in range(6):
            recorder.emit(queued(f"r{number}", ""))
        tail = recorder.since(0, 3)
        assert (tail.number, len(tail.events), tail.dropped, tail.next) == (2, 3, 2, 5)
        assert recorder.since(6) == (6, [], 0)
        assert recorder.since(99) == (6, [], 0)
