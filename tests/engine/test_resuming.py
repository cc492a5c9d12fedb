"""Rows that are preempted and go on: the same tokens, text and log-probabilities, without a gap."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_swarm.broker import BrokerClosed, Delta, Grammar, Request, Sampling, Started
from mlx_swarm.broker.engine.memory import weight_bytes
from mlx_swarm.broker.errors import DeadlineExceeded
from mlx_swarm.broker.trace import events
from tests.engine.driver import Box, Driver, assert_greedy
from tests.engine.random_life import live
from tests.engine.test_logprobs import CLOSE, SIZES, model_of
from tests.tiny_broker import SHARED, prompt

KINDS = {
    "full attention": "llama",
    "windows that are full": "gemma3_text",
    "windows that fill up": f"synthetic:gemma3_text?layers=4&{SIZES}&window=70",
    "state": "mamba2",
    "state and attention": f"synthetic:lfm2?layers=4&{SIZES}",
    "replicated": "deepseek_v3",
}
EVERYTHING = Sampling(
    temperature=1.1,
    top_p=0.95,
    seed=3,
    repetition_penalty=1.2,
    repetition_context_size=0,
    presence_penalty=0.4,
    presence_context_size=4,
    frequency_penalty=0.3,
    frequency_context_size=0,
    logit_bias={11: 2.0, 12: -100.0},
    xtc_probability=0.5,
    xtc_threshold=0.02,
    min_tokens=6,
)
TERSE = Sampling(logit_bias={2: 100.0}, min_tokens=5)
WARM = Sampling(temperature=1.0, seed=9)
PATTERN = Grammar(regex="[a-f]{4}(-[0-9]{3}){2}")


def asked(stop: Sequence[str] = ()) -> list[Request]:
    """Requests with everything that a request can have; the fourth stops at strings."""
    told: dict[str, Any] = {"logprobs": True, "top_logprobs": 3}
    return [
        Request(tokens=prompt(0), max_tokens=9, **told),
        Request(tokens=prompt(1), max_tokens=12, sampling=EVERYTHING, **told),
        Request(tokens=prompt(2), max_tokens=20, sampling=WARM, grammar=PATTERN, **told),
        Request(tokens=prompt(3), max_tokens=14, sampling=WARM, stop=stop),
        Request(tokens=prompt(4), max_tokens=8, sampling=EVERYTHING, cache=False, **told),
        Request(tokens=prompt(5), max_tokens=12, sampling=TERSE, boundaries=(len(SHARED),)),
        Request(tokens=[9], max_tokens=5),
    ]


def undisturbed(kind: str) -> tuple[list[Request], list[Box]]:
    """Requests, the fourth of which stops within its output, and what they get alone."""
    model = model_of(KINDS[kind])
    free = alone(model, asked()[3])
    assert free.end is not None
    requests = asked([free.end.text[4:7]] if len(free.end.text) > 7 else ["never"])
    return requests, [alone(model, each) for each in requests]


def alone(model: Any, request: Request) -> Box:
    driver = Driver(model)
    box = driver.submit(request)
    driver.run()
    driver.engine.close()
    return box


def check_same(box: Box, expected: Box, request: Request) -> None:
    """Assert that a stream is whole, and that of an undisturbed run: log-probabilities within what
    sums in another order make of them.
    """
    assert box.error is None, box.error
    assert box.end is not None
    assert expected.end is not None
    assert type(box.events[0]) is Started
    assert [type(each) for each in box.events[1:-1]] == [Delta] * (len(box.events) - 2)
    assert box.tokens == list(box.end.tokens) == expected.tokens
    texts = [event.text for event in box.events if isinstance(event, Delta)]
    assert "".join(texts) == box.end.text == expected.end.text
    assert box.end.finish_reason == expected.end.finish_reason
    assert box.logprobs == list(box.end.logprobs)
    assert len(box.logprobs) == len(box.tokens) * request.logprobs
    for mine, its in zip(box.logprobs, expected.logprobs, strict=True):
        assert mine.token == its.token
        assert abs(mine.logprob - its.logprob) < 2 * CLOSE
        for (_, value), (_, other) in zip(mine.top, its.top, strict=True):
            assert abs(value - other) < 2 * CLOSE
    usage = box.end.usage
    assert usage.prompt_tokens == len(request.tokens)
    assert usage.cached_tokens + usage.prefilled_tokens == usage.prompt_tokens
    assert min(usage.ram_tokens, usage.prefilled_tokens) >= 0
    assert usage.output_tokens == len(box.tokens)
    assert usage.recomputed_tokens >= 0


class Interrupter:
    """Preempts rows of a driver each time that they have come further than before."""

    def __init__(self, driver: Driver, only: Callable[[int], bool] = lambda index: True) -> None:
        self.driver = driver
        self.only = only
        self.count = 0
        self._reached: dict[str, tuple[int, int]] = {}

    def run(self, turns: int = 1 << 30) -> None:
        """So many turns, or until nothing is left to do."""
        while turns and self.driver.engine.turn():
            turns -= 1
            self.driver.engine.check_integrity()
            for index in filter(self.only, range(len(self.driver.boxes))):
                self._interrupt(index)

    def _interrupt(self, index: int) -> None:
        row = self.driver.engine._rows.get(f"request-{index}")  # type: ignore[call-overload]
        if row is None:
            return
        reached = max(row.position, row.reached), len(row.output)
        if reached > self._reached.get(row.id, (0, -1)) and self.driver.preempt(index):
            self._reached[row.id] = reached
            self.count += 1


def resumed(driver: Driver) -> list[events.Resumed]:
    return [e for e in driver.recorder.events() if type(e) is events.Resumed]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_preempted_at_every_step_are_as_if_they_were_not(kind: str) -> None:
    requests, expected = undisturbed(kind)
    driver = Driver(model_of(KINDS[kind]), max_rows=4, chunk=16)
    interrupter = Interrupter(driver)
    for request in requests:
        driver.submit(request)
        interrupter.run(3)
    interrupter.run()
    for box, its, request in zip(driver.boxes, expected, requests, strict=True):
        check_same(box, its, request)
    outputs = sum(len(box.tokens) - 1 for box in driver.boxes)
    assert interrupter.count >= outputs
    assert driver.engine.statistics().requests.preempted == interrupter.count
    assert len(resumed(driver)) == interrupter.count
    driver.check_idle()
    driver.engine.close()


@pytest.mark.parametrize("kind", ["full attention", "windows that fill up", "state"])
def test_a_row_that_is_preempted_once_or_twice_at_any_turn_is_as_if_it_was_not(kind: str) -> None:
    requests, expected = undisturbed(kind)
    for at in range(0, 26, 3):
        driver = Driver(model_of(KINDS[kind]), max_rows=3, chunk=16)
        for request in requests[:4]:
            driver.submit(request)
        driver.run(at)
        driver.preempt(1)
        driver.run(at // 3)
        driver.preempt(1)
        driver.run()
        for box, its, request in zip(driver.boxes, expected, requests, strict=False):
            check_same(box, its, request)
        driver.check_idle()
        driver.engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_put_is_not_computed_again(kind: str) -> None:
    driver = Driver(model_of(KINDS[kind]), chunk=16)
    box = driver.submit(Request(tokens=prompt(0), max_tokens=12))
    driver.decode_all([box], 5)
    driver.preempt(0)
    driver.run()
    assert box.end is not None
    # A state that is ahead by the last token serves no more.
    most = 5 if kind == "replicated" else 0
    assert box.end.usage.recomputed_tokens <= most
    (event,) = resumed(driver)
    assert event.output_tokens == 5
    assert event.ram_tokens + event.prefilled_tokens == len(prompt(0)) + 5
    assert event.prefilled_tokens <= most + 1
    driver.engine.close()


@pytest.mark.parametrize("kind", ["full attention", "state", "replicated"])
@pytest.mark.parametrize("cached", [False, True])
def test_what_nothing_keeps_is_computed_again_and_the_stream_has_no_gap(
    kind: str, cached: bool
) -> None:
    """A request without the cache, or a cache of no size."""
    model = model_of(KINDS[kind])
    request = Request(tokens=prompt(1), max_tokens=10, sampling=EVERYTHING, cache=cached)
    driver = Driver(model, ram=0 if cached else 64 << 20, chunk=16)
    box = driver.submit(request)
    driver.decode_all([box], 4)
    driver.preempt(0)
    driver.run()
    check_same(box, alone(model, request), request)
    assert box.end is not None
    assert box.end.usage.recomputed_tokens == len(request.tokens) + 4 - 1
    assert box.end.usage.prefilled_tokens == len(request.tokens)
    driver.check_idle()
    driver.engine.close()


def test_what_the_cold_tier_has_is_read_when_a_row_goes_on(tmp_path: Path) -> None:
    model = model_of("llama")
    request = Request(tokens=prompt(1), max_tokens=10, sampling=EVERYTHING)
    driver = Driver(model, cold=tmp_path, chunk=16)
    box = driver.submit(request)
    driver.decode_all([box], 4)
    driver.preempt(0)
    driver.engine.flush(10)
    driver.engine.cache.shrink(1 << 40)
    assert not driver.engine.cache.total_bytes
    driver.run()
    check_same(box, alone(model, request), request)
    (event,) = resumed(driver)
    assert event.cold_tokens == len(request.tokens) + 4 - 1
    assert box.end is not None
    assert box.end.usage.cold_tokens == box.end.usage.recomputed_tokens == 0
    driver.engine.flush(10)
    driver.run()
    driver.check_idle()
    driver.engine.close()


def test_when_a_leader_is_preempted_its_followers_go_on_without_it() -> None:
    model = model_of("llama")
    requests = [Request(tokens=prompt(agent, own=30), max_tokens=6) for agent in range(3)]
    driver = Driver(model, chunk=16)
    for request in requests:
        driver.submit(request)
    while not any(type(e) is events.PrefillChunk for e in driver.recorder.events()):
        driver.run(1)
    assert driver.engine.scheduler.statistics().waiting == 2
    assert driver.preempt(0)
    assert driver.engine.scheduler.statistics().waiting == 0
    driver.run()
    for request, box in zip(requests, driver.boxes, strict=True):
        check_same(box, alone(model, request), request)
    computed = [e for e in driver.recorder.events() if type(e) is events.PrefillChunk]
    assert sum(e.stop - e.start for e in computed) <= len(SHARED) + 3 * 30
    driver.check_idle()
    driver.engine.close()


def test_an_urgent_request_takes_a_place_and_the_trace_says_whose() -> None:
    model = model_of("llama")
    driver = Driver(model, max_rows=1)
    first = driver.submit(Request(tokens=prompt(0), max_tokens=12))
    driver.decode_all([first], 3)
    urgent = driver.submit(Request(tokens=prompt(1), max_tokens=4, priority=1))
    driver.run()
    (left,) = [e for e in driver.recorder.events() if type(e) is events.Preempted]
    assert (left.request, left.by, left.reason) == ("request-0", "request-1", "priority")
    assert left.kept_tokens == len(prompt(0)) + left.output_tokens
    order = [e.request for e in driver.recorder.events() if type(e) is events.Admitted]
    assert order == ["request-0", "request-1", "request-0"]
    for box, agent, tokens in ((first, 0, 12), (urgent, 1, 4)):
        request = Request(tokens=prompt(agent), max_tokens=tokens)
        check_same(box, alone(model, request), request)
    driver.check_idle()
    driver.engine.close()


def test_agents_whose_requests_are_long_take_turns() -> None:
    model = model_of("llama")
    driver = Driver(model, max_rows=1)
    driver.engine.scheduler._slice = 8
    requests = [
        Request(tokens=prompt(agent), max_tokens=40, agent=f"a{agent}") for agent in range(2)
    ]
    for request in requests:
        driver.submit(request)
    driver.run()
    left = [e for e in driver.recorder.events() if type(e) is events.Preempted]
    assert len(left) >= 4
    for event, later in pairwise(left):
        assert (event.reason, event.request) == ("slice", later.by)
    for request, box in zip(requests, driver.boxes, strict=True):
        check_same(box, alone(model, request), request)
    driver.check_idle()
    driver.engine.close()


def test_an_urgent_request_takes_memory_from_who_is_less_urgent() -> None:
    model = model_of("llama")
    memory = weight_bytes(model) + model_memory(model, 2.2)
    driver = Driver(model, max_rows=4, memory=memory)
    requests = [Request(tokens=prompt(agent), max_tokens=30) for agent in range(2)]
    for request in requests:
        driver.submit(request)
    driver.decode_all(driver.boxes, 2)
    requests.append(Request(tokens=prompt(7), max_tokens=30, priority=1))
    driver.submit(requests[-1])
    while driver.engine.turn():
        driver.engine.check_integrity()
        assert driver.engine.ledger.total <= driver.engine.ledger.limit
    (left,) = [e for e in driver.recorder.events() if type(e) is events.Preempted]
    assert (left.by, left.reason) == ("request-2", "priority")
    for request, box in zip(requests, driver.boxes, strict=True):
        check_same(box, alone(model, request), request)
    driver.check_idle()
    driver.engine.close()


def model_memory(model: Any, rows: float) -> int:
    """Bytes for so many rows of the prompts here and 30 new tokens."""
    driver = Driver(model)
    each = driver.engine.lane.kv_bytes(len(prompt(0)) + 30, 0)
    driver.engine.close()
    return int(rows * each)


@pytest.mark.parametrize("end", ["cancel", "deadline", "close"])
def test_a_preempted_row_ends_like_any_other(end: str) -> None:
    now = 0.0
    driver = Driver(model_of("llama"), max_rows=1, clock=lambda: now)
    box = driver.submit(Request(tokens=prompt(0), max_tokens=12, deadline=9.0))
    driver.decode_all([box], 3)
    driver.submit(Request(tokens=prompt(1), max_tokens=12, priority=1))
    while not driver.engine.statistics().requests.preempted:
        driver.run(1)
    assert driver.engine.statistics().requests.queued == 2
    kept = driver.engine.cache.find_exact([*prompt(0), *box.tokens], namespace_of(driver, 0))
    if end == "cancel":
        driver.cancel(0)
        assert box.end is not None
        assert (box.end.finish_reason, list(box.end.tokens)) == ("cancelled", box.tokens)
        assert box.end.usage.prompt_tokens == len(prompt(0))
    elif end == "deadline":
        now = 10.0
        driver.run()
        assert isinstance(box.error, DeadlineExceeded)
        assert "66 of 66" in str(box.error)
    else:
        driver.engine.close()
        assert isinstance(box.error, BrokerClosed)
        return
    driver.run()
    assert kept is not None
    driver.check_idle()
    driver.engine.close()


def namespace_of(driver: Driver, index: int) -> str:
    return driver.engine._rows[f"request-{index}"].namespace  # type: ignore[index]


def test_what_cannot_be_put_ends_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    driver = Driver(model)
    for agent in range(2):
        driver.submit(Request(tokens=prompt(agent), max_tokens=8))
    driver.decode_all(driver.boxes, 3)

    def broken(*_: Any) -> None:
        raise ValueError("broken on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(driver.engine.cache, "put", broken)
        driver.preempt(0)
    driver.run()
    assert "on purpose" in str(driver.boxes[0].error)
    assert_greedy(model, prompt(1), driver.boxes[1].tokens)
    assert len(driver.boxes[1].tokens) == 8
    driver.check_idle()
    driver.engine.close()


@st.composite
def requests_of_all_kinds(draw: st.DrawFn) -> Request:
    """One of the requests above with another prompt, priority and length."""
    like = draw(st.sampled_from(asked()))
    fields = {name: getattr(like, name) for name in like.__struct_fields__}
    own = draw(st.lists(st.integers(1, 250), min_size=1, max_size=12))
    fields["tokens"] = [*SHARED[: draw(st.sampled_from([0, 40, 60]))], *own]
    fields["priority"] = draw(st.integers(-1, 1))
    fields["agent"] = draw(st.sampled_from(["", "a", "b"]))
    return Request(**fields)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=4, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_life_with_priorities_and_preemptions_gives_what_each_gets_alone(
    kind: str, data: st.DataObject
) -> None:
    model = model_of(KINDS[kind])
    driver = Driver(model, max_rows=data.draw(st.integers(1, 4)), chunk=16)
    requests = live(
        data,
        driver,
        lambda _: data.draw(requests_of_all_kinds()),
        lambda _: driver.engine.check_integrity(),
    )
    for request, box in zip(requests, driver.boxes, strict=True):
        assert box.end is not None, box.error
        whole = alone(model, request)
        if box.end.finish_reason == "cancelled":
            assert box.tokens == whole.tokens[: len(box.tokens)]
        else:
            check_same(box, whole, request)
    driver.engine.close()
