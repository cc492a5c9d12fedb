"""The demo's numbers come from the trace, request by request."""

import io

import pytest
from rich.console import Console

from mlx_swarm.agents.demo.report import Run, read_run
from mlx_swarm.agents.demo.tables import print_run
from mlx_swarm.broker.errors import TraceError
from mlx_swarm.broker.trace.events import Event, Finished, FirstToken, Planned, Queued


def trace_of(agent: str, swarm: str, start: float, cached: int) -> list[Event]:
    """A request of 100 prompt tokens whose first token takes 2 seconds, and 10 more 5."""
    request = f"{swarm}/{agent}"
    return [
        Queued(
            time=start + 0.5,
            submitted=start,
            request=request,
            agent=agent,
            swarm=swarm,
            namespace="",
            prompt_tokens=100,
            max_tokens=11,
        ),
        Planned(
            time=start + 1,
            request=request,
            prompt_tokens=100,
            ram_tokens=cached,
            cold_tokens=0,
            prefilled_tokens=100 - cached,
            donor=None,
            reason=None,
        ),
        FirstToken(time=start + 2, request=request),
        Finished(time=start + 7, request=request, finish_reason="length", output_tokens=11),
    ]


def run() -> Run:
    events = [
        *trace_of("a", "demo", 10.0, cached=0),
        *trace_of("b", "demo", 11.0, cached=90),
        *trace_of("a", "other", 12.0, cached=50),
    ]
    return read_run(events, "demo", 80, {"b": "text of b", "a": "text of a"})


def test_agents_are_those_of_the_run_in_the_order_of_their_texts() -> None:
    agents = run().agents
    assert [(agent.name, agent.cached_tokens) for agent in agents] == [("b", 90), ("a", 0)]
    assert agents[0].text == "text of b"


def test_times_are_measured_from_the_submission() -> None:
    agent = run().agents[0]
    assert (agent.ttft, agent.rate) == (2.0, 2.0)


def test_totals_span_the_whole_run() -> None:
    report = run().as_json()
    assert report["seconds"] == 8.0
    assert run().last_first_token == 3.0
    totals = ("agents", "shared_prefix_tokens", "prompt_tokens", "prefilled_tokens")
    assert [report[name] for name in totals] == [2, 80, 200, 110]


def test_a_trace_without_its_beginning_says_so() -> None:
    events = trace_of("a", "demo", 10.0, cached=0)[1:]
    with pytest.raises(TraceError, match="outgrew its trace, which holds the last 3 events"):
        read_run(events, "demo", 80, {"a": "text"})


@pytest.mark.parametrize(("cached", "is_more"), [(80, False), (81, True)])
def test_more_cached_than_in_common_is_explained(cached: int, is_more: bool) -> None:
    read = read_run(trace_of("a", "demo", 10.0, cached=cached), "demo", 80, {"a": ""})
    printed = io.StringIO()
    print_run(Console(file=printed, width=200), read, "shared")
    assert ("in common (more is cached where tasks begin alike" in printed.getvalue()) == is_more
