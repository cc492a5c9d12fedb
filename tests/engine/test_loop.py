"""Cancellation at every point, and failures of every part: what is left and who lives on."""

import itertools
import threading
from pathlib import Path
from typing import Any

import anyio
import mlx.core as mx
import pytest

from mlx_swarm.broker import (
    Broker,
    BrokerClosed,
    CacheError,
    Completed,
    Delta,
    EngineFailed,
    OutOfMemory,
    Request,
    ResponseStream,
    Sampling,
    SwarmError,
)
from mlx_swarm.broker.engine.loop import EngineLoop
from mlx_swarm.broker.engine.row import Row
from mlx_swarm.broker.trace import events
from tests.tiny_broker import SHARED, check_idle, inside, prompt, reference, request, tiny

pytestmark = pytest.mark.anyio

Outcomes = dict[int, Completed | Exception]


async def outcomes(broker: Broker, *requests: Request) -> Outcomes:
    """What becomes of requests that arrive in this order and run side by side."""
    found: Outcomes = {}

    async def read(index: int, stream: ResponseStream) -> None:
        try:
            async for event in stream:
                if isinstance(event, Completed):
                    found[index] = event
        except Exception as error:
            found[index] = error

    streams = [broker.stream(each) for each in requests]
    async with anyio.create_task_group() as group:
        for index, stream in enumerate(streams):
            group.start_soon(read, index, stream)
    return found


async def cancel_at_turn(broker: Broker, agent: str, turn: int) -> None:
    """Cancel the agent's request in the engine's thread, `turn` turns after it arrived."""

    def arm(engine: EngineLoop) -> None:
        original, left = engine.turn, turn

        def counted() -> bool:
            nonlocal left
            mine = [row.id for row in engine._rows.values() if row.request.agent == agent]
            if mine and left == 0:
                engine.cancel(mine[0])
            left -= bool(mine)
            return original()

        engine.turn = counted  # type: ignore[method-assign]

    await inside(broker, arm)


@pytest.mark.parametrize("victim", [0, 1])
async def test_cancelling_at_any_turn_leaves_nothing_and_disturbs_nobody(victim: int) -> None:
    """Each round cancels one of three requests a turn later, until it has ended before that."""
    asked = [request(agent, max_tokens=3) for agent in range(3)]
    async with tiny() as broker:
        expected = [(await broker.complete(each)).tokens for each in asked]
    async with tiny() as broker:
        for turn in itertools.count():
            await inside(broker, lambda engine: engine.cache.clear())
            await cancel_at_turn(broker, f"agent-{victim}", turn)
            found = await outcomes(broker, *asked)
            await check_idle(broker)
            results = [found[index] for index in range(3)]
            for index, result in enumerate(results):
                assert isinstance(result, Completed)
                assert index == victim or result.finish_reason == "length"
                assert result.tokens == expected[index][: len(result.tokens)]
                assert len(result.tokens) == 3 or result.finish_reason == "cancelled"
            if results[victim].finish_reason == "length":  # type: ignore[union-attr]
                break
    assert turn > 12


async def test_a_cancel_in_prefill_stops_within_a_chunk_and_keeps_what_was_computed() -> None:
    long = request(tokens=[(at * 7) % 200 + 5 for at in range(200)])
    async with tiny() as broker:
        await cancel_at_turn(broker, "agent-0", 4)
        (result,) = (await outcomes(broker, long)).values()
        retry = await broker.complete(long)
        await check_idle(broker)
    assert isinstance(result, Completed)
    assert result.finish_reason == "cancelled"
    assert result.tokens == ()
    chunks = [event for event in broker.recorder.events() if type(event) is events.PrefillChunk]
    assert [chunk.start for chunk in chunks] == [*range(0, 199, 16)]
    assert result.usage.prompt_tokens == result.usage.prefilled_tokens == retry.usage.ram_tokens > 0


async def test_a_cancel_while_decoding_keeps_the_output_for_the_next_turn() -> None:
    async with tiny() as broker:
        async with broker.stream(request(max_tokens=100)) as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    break
            stream.cancel()
            end = [event async for event in stream][-1]
        assert isinstance(end, Completed)
        assert end.finish_reason == "cancelled"
        turn = [*prompt(0), *end.tokens, 11, 12]
        again = await broker.complete(request(tokens=turn, max_tokens=1))
        await check_idle(broker)
    assert again.usage.ram_tokens == len(turn) - 2


async def test_dropping_the_stream_or_the_task_cancels_the_request() -> None:
    endless = request(max_tokens=180)
    async with tiny() as broker:
        async for event in broker.stream(endless):
            if isinstance(event, Delta):
                break
        del event
        await check_idle(broker)
        with anyio.CancelScope() as scope:
            async for _ in broker.stream(endless):
                scope.cancel()
                await anyio.lowlevel.checkpoint()
        await check_idle(broker)
        async with broker.stream(endless):
            pass
        await check_idle(broker)
    ends = [event for event in broker.recorder.events() if isinstance(event, events.Cancelled)]
    assert len(ends) == 3


async def test_cancelling_twice_or_too_late_does_nothing() -> None:
    async with tiny() as broker:
        stream = broker.stream(request())
        seen = [event async for event in stream]
        stream.cancel()
        stream.cancel()
        assert [event async for event in stream] == []
        await check_idle(broker)
    stream.cancel()
    assert isinstance(seen[-1], Completed)


async def test_a_failed_step_ends_its_rows_and_the_engine_lives_on() -> None:
    async with tiny() as broker:
        expected = await broker.complete(request(0))

        def break_once(engine: EngineLoop) -> None:
            original = engine.lane.step

            def step() -> list[Any]:
                engine.lane.step = original  # type: ignore[method-assign]
                raise RuntimeError("out of luck")

            engine.lane.step = step  # type: ignore[method-assign]

        await inside(broker, break_once)
        found = await outcomes(broker, *(request(agent) for agent in range(3)))
        await check_idle(broker)
        again = await broker.complete(request(0))
    assert all(isinstance(error, EngineFailed) for error in found.values())
    assert "out of luck" in str(found[0])
    assert again.tokens == expected.tokens


async def test_a_step_that_fails_inside_mlx_lm_is_recovered_from() -> None:
    """The batch is left half-way through its own bookkeeping, not merely untouched."""
    async with tiny() as broker:
        expected = await broker.complete(request(0, max_tokens=6))
        stream = broker.stream(request(1, max_tokens=150))
        await anext(stream)

        def break_once(engine: EngineLoop) -> None:
            inner = engine.model.model.model
            original = inner.norm

            def broken(hidden: mx.array) -> mx.array:
                inner.norm = original
                raise MemoryError("no room for the last layer")

            inner.norm = broken

        await inside(broker, break_once)
        with pytest.raises(EngineFailed, match="no room for the last layer"):
            async for _ in stream:
                pass
        await check_idle(broker)
        again = await broker.complete(request(0, max_tokens=6))
    assert again.tokens == expected.tokens


async def test_a_prefill_that_fails_ends_that_row_and_a_follower_takes_over() -> None:
    async with tiny() as broker:
        expected = [(await broker.complete(request(agent))).tokens for agent in range(3)]
        await inside(broker, lambda engine: engine.cache.clear())
        await inside(broker, lambda engine: _fail_for(engine, "prefill_together", "agent-0", 2))
        found = await outcomes(broker, *(request(agent) for agent in range(3)))
        await check_idle(broker)
    assert isinstance(found[0], EngineFailed)
    assert "prefill_together failed on purpose" in str(found[0])
    for agent in (1, 2):
        result = found[agent]
        assert isinstance(result, Completed)
        assert result.tokens == expected[agent]


@pytest.mark.parametrize("error", [CacheError, OutOfMemory])
async def test_a_put_that_is_refused_costs_the_hit_and_nothing_else(
    error: type[SwarmError],
) -> None:
    def refuse(*arguments: Any) -> Any:
        raise error("no")

    async with tiny() as broker:
        expected = [(await broker.complete(request(agent))).tokens for agent in range(3)]
        await inside(broker, lambda engine: engine.cache.clear())
        await inside(broker, lambda engine: setattr(engine.cache, "put", refuse))
        found = await outcomes(broker, *(request(agent) for agent in range(3)))
        await check_idle(broker)
    assert [found[agent].tokens for agent in range(3)] == expected  # type: ignore[union-attr]


@pytest.mark.parametrize("part", ["open", "store", "join"])
async def test_whatever_fails_for_one_row_ends_that_row_alone(part: str) -> None:
    async with tiny() as broker:
        expected = (await broker.complete(request(1))).tokens
        await inside(broker, lambda engine: _fail_for(engine, part, "agent-0"))
        # Wants to be stored where nobody else is: at the end of its prompt.
        asked = request(0, boundaries=(len(request(0).tokens) - 1,)), request(1)
        found = await outcomes(broker, *asked)
        await check_idle(broker)
    failed = [event for event in broker.recorder.events() if isinstance(event, events.Failed)]
    assert [event.error for event in failed] == [str(failed[0].error)]
    assert isinstance(found[0], EngineFailed)
    other = found[1]
    assert isinstance(other, Completed)
    assert other.tokens == expected


def _fail_for(engine: EngineLoop, part: str, agent: str, after: int = 0) -> None:
    original = getattr(engine.lane, part)
    calls = 0

    def failing(what: Row | list[tuple[Row, int]], *arguments: Any) -> Any:
        nonlocal calls
        rows = [what] if isinstance(what, Row) else [row for row, _ in what]
        if any(row.request.agent == agent for row in rows):
            calls += 1
            if calls > after:
                raise RuntimeError(f"{part} failed on purpose")
        return original(what, *arguments)

    setattr(engine.lane, part, failing)


async def test_a_cache_without_room_serves_all_the_same() -> None:
    async with tiny(ram=0) as broker:
        found = await outcomes(broker, *(request(agent) for agent in range(3)))
        await check_idle(broker)
    assert all(isinstance(result, Completed) for result in found.values())


async def test_an_out_of_memory_of_one_row_keeps_its_type() -> None:
    def refuse(*arguments: Any) -> Any:
        raise OutOfMemory("1 GiB needed, 0.5 GiB left")

    async with tiny() as broker:
        await inside(broker, lambda engine: setattr(engine.cache, "lease", refuse))
        found = await outcomes(broker, request())
        await check_idle(broker)
    assert isinstance(found[0], OutOfMemory)


async def test_a_broken_sampler_ends_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, logprobs: mx.array, key: mx.array) -> mx.array:
        raise ValueError("no such filter")

    async with tiny() as broker:
        expected = (await broker.complete(request(1))).tokens
        monkeypatch.setattr("mlx_swarm.broker.engine.sampling.RowSampler._choose", broken)
        hot = request(0, sampling=Sampling(temperature=1.0))
        found = await outcomes(broker, hot, request(1))
        await check_idle(broker)
    assert isinstance(found[0], EngineFailed)
    assert "no such filter" in str(found[0])
    assert found[1].tokens == expected  # type: ignore[union-attr]


async def test_a_broken_detokenizer_ends_its_row_alone() -> None:
    class Broken:
        def add_token(self, token: int) -> None:
            raise KeyError(token)

        def finalize(self) -> None:
            """Fine until then."""

        last_segment = ""

    def break_first(engine: EngineLoop) -> None:
        original, made = engine.model.new_detokenizer, 0

        def make() -> Any:
            nonlocal made
            made += 1
            return Broken() if made == 1 else original()

        engine.model.new_detokenizer = make  # type: ignore[method-assign]

    async with tiny() as broker:
        await inside(broker, break_first)
        found = await outcomes(broker, request(0), request(1))
        await check_idle(broker)
    assert sorted(type(result).__name__ for result in found.values()) == [
        "Completed",
        "EngineFailed",
    ]


async def test_a_scheduler_gone_wrong_ends_what_is_open_and_the_engine_lives_on() -> None:
    def break_once(engine: EngineLoop) -> None:
        original = engine.scheduler.next

        def wrong() -> Any:
            if not engine._rows:
                return None
            engine.scheduler.next = original  # type: ignore[method-assign]
            raise AssertionError("lost count")

        engine.scheduler.next = wrong  # type: ignore[method-assign]

    async with tiny() as broker:
        await inside(broker, break_once)
        found = await outcomes(broker, request())
        assert isinstance(found[0], EngineFailed)
        await check_idle(broker)
        assert len((await broker.complete(request())).tokens) == 8


async def test_closing_fails_what_is_open_and_leaves_no_thread() -> None:
    errors: list[Exception] = []
    started = anyio.Event()

    async def read(broker: Broker, each: Request) -> None:
        try:
            async for _ in broker.stream(each):
                started.set()
        except BrokerClosed as error:
            errors.append(error)

    async with anyio.create_task_group() as group, tiny(max_rows=2) as broker:
        for agent in range(4):
            group.start_soon(read, broker, request(agent, max_tokens=180))
        await started.wait()
        engine = await inside(broker, lambda engine: engine)
    assert len(errors) == 4
    assert engine._rows == {}
    assert not [each for each in threading.enumerate() if each.name.startswith("mlx-swarm")]


async def test_cancelling_the_start_ends_the_loading(tmp_path: Path) -> None:
    async def enter() -> None:
        async with tiny(trace=tmp_path / "trace.jsonl"):
            await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        group.start_soon(enter)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert not [each for each in threading.enumerate() if each.name.startswith("mlx-swarm")]


async def test_a_running_row_s_prompt_serves_others_while_it_decodes() -> None:
    async with tiny() as broker, broker.stream(request(0, max_tokens=180)) as stream:
        async for event in stream:
            if isinstance(event, Delta):
                break
        other = await broker.complete(request(1, max_tokens=1))
        assert other.usage.ram_tokens == len(SHARED)
        assert (await broker.statistics()).engine.requests.decoding == 1


async def test_a_running_row_donates_what_it_has_generated_so_far() -> None:
    """A fork of a reply that is still being written computes only what it adds."""
    async with tiny() as broker, broker.stream(request(0, max_tokens=180)) as stream:
        written: list[int] = []
        async for event in stream:
            written += event.tokens if isinstance(event, Delta) else ()
            if len(written) >= 20:
                break
        told = [*request(0).tokens, *written]
        fork = await broker.complete(request(1, tokens=[*told, 7, 8, 9], max_tokens=6))
        assert fork.usage.prefilled_tokens <= 3 + 1
        expected = await inside(broker, lambda engine: reference(engine.model, [*told, 7, 8, 9], 6))
        assert fork.tokens == expected
        rest = [event async for event in stream if isinstance(event, Delta)]
        whole = [*written, *(token for event in rest for token in event.tokens)]
        assert len(whole) == 180
        solo = await inside(broker, lambda engine: reference(engine.model, request(0).tokens, 180))
        assert tuple(whole) == solo


async def test_the_trace_tells_what_rows_read_together() -> None:
    async with tiny() as broker:
        await outcomes(broker, *(request(agent, max_tokens=12 + 8 * agent) for agent in range(3)))
        seen = broker.recorder.events()
    told = [event for event in seen if isinstance(event, events.Shared)]
    steps = [event for event in seen if isinstance(event, events.DecodeStep)]
    # Of the shared tokens once while all three read them, and again as these get fewer.
    spans = [event.spans[0] for event in told if event.spans]
    assert spans[0][1] >= 2
    assert all(tokens >= len(SHARED) - 1 for tokens, _ in spans)
    assert len(told) < len(steps) / 2
    assert {event.model for event in told} == {broker.model_name}
    assert {event.model for event in steps} == {broker.model_name}
