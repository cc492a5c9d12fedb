"""The broker over a tiny random model, on asyncio and trio: what it answers and what it refuses."""

import threading
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from mlx_swarm.broker import (
    BackendMissing,
    Broker,
    BrokerClosed,
    Completed,
    ContextOverflow,
    Delta,
    InvalidRequest,
    InvalidSetting,
    Message,
    ModelNotFound,
    ModelUnreadable,
    Request,
    ResponseStream,
    Sampling,
    Started,
    StreamEvent,
    Usage,
)
from mlx_swarm.broker.models import LoadedModel
from mlx_swarm.broker.sizes import parse_size
from mlx_swarm.broker.trace import events
from tests.tiny_broker import (
    SHARED,
    VOCABULARY,
    check_idle,
    inside,
    prompt,
    reference,
    request,
    tiny,
)

pytestmark = pytest.mark.anyio


async def together(broker: Broker, *requests: Request) -> list[Completed]:
    """Complete requests side by side; results in the order of the requests."""
    done: dict[int, Completed] = {}

    async def complete(index: int, each: Request) -> None:
        done[index] = await broker.complete(each)

    async with anyio.create_task_group() as group:
        for index, each in enumerate(requests):
            group.start_soon(complete, index, each)
    return [done[index] for index in range(len(requests))]


async def test_greedy_tokens_equal_mlx_lm_alone_and_batched() -> None:
    asked = [request(agent, tokens=prompt(agent, own=1 + 3 * agent)) for agent in range(6)]
    asked.append(request(tokens=[5], max_tokens=12))
    async with tiny() as broker:
        expected = await inside(
            broker,
            lambda engine: [
                reference(engine.model, each.tokens, each.max_tokens) for each in asked
            ],
        )
        batched = await together(broker, *asked)
        again = await together(broker, *asked)
        alone = [await broker.complete(each) for each in asked]
        await check_idle(broker)
    for results in (batched, again, alone):
        assert [result.tokens for result in results] == expected


async def test_agents_that_start_together_prefill_their_shared_prefix_once() -> None:
    async with tiny() as broker:
        results = await together(broker, *(request(agent) for agent in range(8)))
    usage = sum((result.usage for result in results), Usage())
    assert usage.prefilled_tokens == len(SHARED) + 8 * 6
    assert usage.prompt_tokens == usage.prefilled_tokens + usage.ram_tokens == 8 * 66
    waiting = [event for event in broker.recorder.events() if isinstance(event, events.Waiting)]
    assert len(waiting) == 7


async def test_a_boundary_serves_agents_that_share_only_the_instructions() -> None:
    async with tiny() as broker:
        await broker.complete(request(0, boundaries=(len(SHARED),)))
        later = await broker.complete(request(1))
    assert later.usage.ram_tokens == len(SHARED)


async def test_the_next_turn_finds_everything_that_was_generated() -> None:
    async with tiny() as broker:
        first = await broker.complete(request())
        turn = [*first.prompt, *first.tokens, 11, 12]
        second = await broker.complete(request(tokens=turn))
    assert first.prompt == tuple(prompt(0))
    assert second.usage.ram_tokens == len(turn) - 2


async def test_uncached_requests_neither_read_nor_leave_anything() -> None:
    async with tiny() as broker:
        first = await broker.complete(request(cache=False))
        second = await broker.complete(request())
        third = await broker.complete(request(cache=False))
    assert first.tokens == second.tokens == third.tokens
    assert second.usage.ram_tokens == third.usage.ram_tokens == 0


async def test_tenants_do_not_share() -> None:
    async with tiny() as broker:
        await broker.complete(request(tenant="one"))
        other = await broker.complete(request(tenant="two"))
        same = await broker.complete(request(tenant="one"))
    assert other.usage.ram_tokens == 0
    assert same.usage.ram_tokens == len(prompt(0)) - 1


async def test_deltas_add_up_to_the_whole() -> None:
    async with tiny() as broker:
        seen = [event async for event in broker.stream(request(max_tokens=20))]
    assert isinstance(seen[0], Started)
    assert isinstance(seen[-1], Completed)
    deltas = [event for event in seen if isinstance(event, Delta)]
    assert len(deltas) + 2 == len(seen)
    assert "".join(delta.text for delta in deltas) == seen[-1].text
    assert sum((delta.tokens for delta in deltas), ()) == seen[-1].tokens
    assert seen[-1].finish_reason == "length"
    assert seen[-1].ttft_seconds > 0


async def test_messages_are_rendered_and_their_instructions_marked() -> None:
    messages = [Message("system", "Answer in one word."), Message("user", "Why?")]
    async with tiny() as broker:
        rendered = await broker.render(messages)
        done = await broker.complete(Request(messages=messages, max_tokens=2))
        assert done.prompt == tuple(rendered.tokens)
        assert rendered.boundaries
        text = await broker.complete(Request(text="Why?", max_tokens=2))
        assert text.prompt == tuple(await broker.encode("Why?"))


async def test_a_stop_string_ends_the_text_before_it() -> None:
    async with tiny() as broker:
        whole = await broker.complete(request(max_tokens=24))
        stop = whole.text[3:6]
        cut = await broker.complete(request(max_tokens=24, stop=[stop]))
        await check_idle(broker)
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.tokens == whole.tokens[: len(cut.tokens)]
    assert len(cut.tokens) < 24


class EndsOn(Broker):
    """A broker whose model ends with a given token."""

    def __init__(self, *, end: int, **settings: Any) -> None:
        super().__init__(tiny()._model, **settings)
        self._end = end

    def _load(self, progress: Any) -> LoadedModel:
        model = super()._load(progress)
        model.tokenizer.eos_token_ids = {self._end}
        return model


async def test_the_end_token_is_in_the_tokens_and_not_in_the_text() -> None:
    async with tiny() as broker:
        whole = await broker.complete(request(max_tokens=24))
    end = next(token for token in whole.tokens if whole.tokens.index(token) >= 2)
    async with EndsOn(end=end) as broker:
        ended = await broker.complete(request(max_tokens=24))
        await check_idle(broker)
    assert ended.finish_reason == "stop"
    assert ended.tokens == whole.tokens[: whole.tokens.index(end) + 1]
    assert whole.text.startswith(ended.text)
    assert ended.text == whole.text[: len(ended.text)]


async def test_generation_ends_where_the_context_does() -> None:
    async with tiny() as broker:
        assert broker.context_length == 256
        done = await broker.complete(request(tokens=[5] * 250, max_tokens=50))
    assert len(done.tokens) == 6
    assert done.finish_reason == "length"


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"tokens": [5] * 256}, ContextOverflow, "256 tokens; the context .* is 256"),
        ({"tokens": []}, InvalidRequest, "empty prompt"),
        ({"tokens": [1, VOCABULARY]}, InvalidRequest, f"token {VOCABULARY} is outside"),
        ({"tokens": [1, -1]}, InvalidRequest, "token -1 is outside"),
        ({"tokens": [1, 2**40]}, InvalidRequest, f"token {2**40} is outside"),
        ({"tokens": ["a"]}, InvalidRequest, "must be integers"),
        ({"text": "also"}, InvalidRequest, "tokens"),
        ({"max_tokens": 0}, InvalidRequest, "max_tokens is 0"),
        ({"max_tokens": -1}, InvalidRequest, "max_tokens is -1"),
        ({"stop": ["x"] * 10_000}, InvalidRequest, "10,000"),
        ({"stop": [""]}, InvalidRequest, "stop strings"),
        ({"stop": "END"}, InvalidRequest, "must be a list of strings"),
        ({"boundaries": ["a"]}, InvalidRequest, "a boundary is 'a'; it must be a whole number"),
        ({"boundaries": [-3]}, InvalidRequest, "a boundary is -3; it must be 0 or more"),
        ({"sampling": Sampling(temperature=float("nan"))}, InvalidRequest, "temperature is nan"),
        ({"boundaries": None}, InvalidRequest, "boundaries is None"),
        ({"max_tokens": float("nan")}, InvalidRequest, "max_tokens is nan; .* a whole number"),
        ({"max_tokens": "x"}, InvalidRequest, "max_tokens is 'x'"),
        ({"max_tokens": True}, InvalidRequest, "max_tokens is True"),
        ({"tokens": None}, InvalidRequest, "tokens is None"),
        ({"tokens": np.array(5)}, InvalidRequest, "must be a list"),
        ({"tokens": (), "text": b"abc"}, InvalidRequest, "text is b'abc'; it must be text"),
        ({"tokens": (), "text": "a\ud800"}, InvalidRequest, "position 1: .* lone surrogate"),
        ({"tokens": (), "messages": "hello"}, InvalidRequest, "message 0 is 'h'"),
        ({"tokens": (), "messages": [{}]}, InvalidRequest, "message 0 is {}"),
        ({"tokens": (), "messages": [Message("user", None)]}, InvalidRequest, "message 0 is None"),  # type: ignore[arg-type]
        ({"tokens": (), "messages": [Message("bot", "x")]}, InvalidRequest, "the role 'bot'"),  # type: ignore[arg-type]
        ({"stop": [5]}, InvalidRequest, "stop string is 5; it must be text"),
        ({"stop": None}, InvalidRequest, "stop is None"),
        ({"tenant": None}, InvalidRequest, "tenant is None"),
        ({"tenant": "\ud800"}, InvalidRequest, "lone surrogate"),
        ({"swarm": 5}, InvalidRequest, "swarm is 5"),
        ({"cache": "no"}, InvalidRequest, "cache is 'no'"),
        ({"sampling": {"temperature": 1}}, InvalidRequest, "must be a Sampling"),
        ({"sampling": Sampling(temperature="hot")}, InvalidRequest, "temperature is 'hot'"),  # type: ignore[arg-type]
        ({"sampling": Sampling(top_k=1.5)}, InvalidRequest, "top_k is 1.5"),  # type: ignore[arg-type]
        ({"sampling": Sampling(seed=1.5)}, InvalidRequest, "seed is 1.5"),  # type: ignore[arg-type]
    ],
)
async def test_bad_requests_are_refused_before_anything_changes(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    async with tiny() as broker:
        with pytest.raises(error, match=message):
            await broker.complete(request(**fields))
        statistics = await broker.statistics()
        assert statistics.engine.usage == Usage()
        assert len(broker.recorder.events()) == 1
        assert len((await broker.complete(request(max_tokens=2))).tokens) == 2


async def test_a_seed_gives_the_same_tokens_whatever_runs_beside_it() -> None:
    seeded = request(sampling=Sampling(temperature=1.5, seed=11), max_tokens=16)
    others = [
        request(1, sampling=Sampling(temperature=3.0, seed=5)),
        request(2),
        request(3, sampling=Sampling(temperature=0.7, top_k=5, seed=5), max_tokens=3),
    ]
    async with tiny() as broker:
        alone = await broker.complete(seeded)
        greedy = await broker.complete(request(2))
        crowd = await together(broker, *others[:2], seeded, others[2])
    assert crowd[2].tokens == alone.tokens
    assert crowd[1].tokens == greedy.tokens


async def test_requests_without_a_seed_differ_from_each_other() -> None:
    same = request(sampling=Sampling(temperature=2.0), max_tokens=16)
    async with tiny() as broker:
        results = await together(broker, *[same] * 6)
    assert len({result.tokens for result in results}) == 6


async def test_an_array_that_the_caller_changes_is_not_what_is_computed_and_kept() -> None:
    array, given = np.array(prompt(1, own=100), np.uint32), prompt(1, own=100)
    async with tiny() as broker:
        async with broker.stream(request(tokens=array, max_tokens=4)) as response:
            async for event in response:
                if isinstance(event, Started):
                    array[:] = 7
        again = await broker.complete(request(tokens=given, max_tokens=4))
        expected = await inside(broker, lambda engine: reference(engine.model, given, 4))
    assert again.tokens == expected
    assert again.usage.ram_tokens == len(given) - 1


async def test_of_two_readers_of_a_stream_both_come_to_the_end() -> None:
    read: list[StreamEvent] = []

    async def read_all(response: ResponseStream) -> None:
        async for event in response:
            read.append(event)
            await anyio.lowlevel.checkpoint()

    async with tiny() as broker:
        response = broker.stream(request(max_tokens=20))
        async with anyio.create_task_group() as group:
            group.start_soon(read_all, response)
            group.start_soon(read_all, response)
    [completed] = [event for event in read if isinstance(event, Completed)]
    assert sum(len(event.tokens) for event in read if isinstance(event, Delta)) == 20
    assert len(completed.tokens) == 20


async def test_a_reader_that_does_not_read_gets_one_merged_delta() -> None:
    async with tiny() as broker:
        stream = broker.stream(request(max_tokens=30))
        await broker.complete(request(1, max_tokens=40))
        seen = [event async for event in stream]
    assert [type(event) for event in seen] == [Started, Delta, Completed]


async def test_what_happens_to_a_request_is_traced() -> None:
    async with tiny() as broker:
        await broker.complete(request(max_tokens=4))
    kinds = [type(event) for event in broker.recorder.events()]
    assert kinds == [
        events.TraceStarted,
        events.Queued,
        events.Admitted,
        events.Planned,
        *[events.PrefillChunk] * 5,
        events.DecodeStep,
        events.FirstToken,
        *[events.DecodeStep] * 3,
        events.Put,
        events.Finished,
    ]
    started = broker.recorder.events()[0]
    assert isinstance(started, events.TraceStarted)
    assert started.model == broker.model_name
    assert started.backend


async def test_usage_splits_the_time_and_adds_up() -> None:
    async with tiny() as broker:
        results = await together(broker, *(request(agent) for agent in range(3)))
        statistics = await broker.statistics()
    assert sum((result.usage for result in results), Usage()).output_tokens == 24
    assert statistics.engine.usage.requests == 3
    assert statistics.engine.usage.prefilled_tokens == len(SHARED) + 3 * 6
    for result in results:
        parts = result.usage
        assert min(parts.queue_seconds, parts.prefill_seconds, parts.decode_seconds) >= 0
        assert result.ttft_seconds <= (
            parts.queue_seconds + parts.prefill_seconds + parts.decode_seconds
        )


async def test_a_broker_outside_its_context_says_so() -> None:
    broker = tiny()
    with pytest.raises(BrokerClosed, match="async with"):
        broker.stream(request())
    async with broker:
        with pytest.raises(InvalidSetting, match="open already"):
            await broker.__aenter__()
    with pytest.raises(BrokerClosed):
        await broker.complete(request())
    async with broker:
        assert len((await broker.complete(request())).tokens) == 8


async def test_a_broker_is_opened_once_at_a_time_and_can_be_closed_meanwhile() -> None:
    broker, refused = tiny(), []

    async def enter() -> None:
        try:
            await broker.__aenter__()
        except (InvalidSetting, BrokerClosed) as error:
            refused.append(str(error))

    threads = threading.active_count()
    async with anyio.create_task_group() as group:
        group.start_soon(enter)
        group.start_soon(enter)
        while broker._opening is None:
            await anyio.lowlevel.checkpoint()
        await broker.aclose()
    assert sorted(refused) == [
        "the broker was closed while its model was loading",
        "this broker is open already",
    ]
    assert threading.active_count() == threads
    async with broker:
        assert len((await broker.complete(request(max_tokens=2))).tokens) == 2


async def test_a_broker_says_so_in_an_event_loop_that_is_not_its_own() -> None:
    async with tiny() as broker:

        async def use() -> None:
            with pytest.raises(BrokerClosed, match="another event loop"):
                await broker.complete(request())

        await anyio.to_thread.run_sync(lambda: anyio.run(use))


async def test_a_model_that_loads_but_cannot_run_is_one_line() -> None:
    with pytest.raises(ModelUnreadable, match=r"cannot run: TypeError: .*$"):
        async with Broker("synthetic:llama?layers=1&config.rope_theta=abc"):
            pass


async def test_what_is_rendered_or_encoded_is_checked_too() -> None:
    async with tiny() as broker:
        with pytest.raises(InvalidRequest, match="must be a Message"):
            await broker.render([None])  # type: ignore[list-item]
        with pytest.raises(InvalidRequest, match="lone surrogate"):
            await broker.encode("\udfff")


async def test_a_model_that_is_not_there_leaves_nothing_behind() -> None:
    with pytest.raises(ModelNotFound):
        async with Broker("synthetic:nosuchthing"):
            pass
    assert not [each for each in threading.enumerate() if each.name.startswith("mlx-swarm")]


@pytest.mark.parametrize(
    ("size", "expected"),
    [("2GiB", 2**31), ("512MB", 512 * 10**6), (4096, 4096), ("1.5 kib", 1536), ("0", 0)],
)
def test_sizes(size: int | str, expected: int) -> None:
    assert parse_size(size) == expected


@pytest.mark.parametrize(
    "size", ["", "2 GiBB", "lots", "-1", -1, "1e9", "nan", "9" * 400, True, 1.5]
)
def test_sizes_that_are_none(size: Any) -> None:
    with pytest.raises(InvalidSetting, match="is not a size"):
        Broker("any", ram=size)


@pytest.mark.parametrize("setting", ["max_rows", "max_queue", "prefill_chunk"])
def test_settings_below_one_are_refused(setting: str) -> None:
    for value in (0, 1.5, True, "x"):
        with pytest.raises(InvalidSetting, match=f"{setting} is {value!r}; it must be at least 1"):
            tiny(**{setting: value})


def test_without_mlx_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("sys.platform", "linux")
    with pytest.raises(BackendMissing, match=r"mlx-swarm\[cpu\]"):
        Broker("any")
