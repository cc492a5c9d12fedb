"""Faults that users of other engines have met, each under its number in the list of them."""

import random
import re
import threading
import time
from pathlib import Path

import pytest

from mlx_swarm.broker import Grammar, Request, Sampling
from mlx_swarm.broker.affinity import ThreadGuard
from mlx_swarm.broker.engine import loop
from mlx_swarm.broker.engine.memory import weight_bytes
from mlx_swarm.broker.engine.roster import ModelSource
from mlx_swarm.broker.errors import EngineFailed, OutOfMemory
from mlx_swarm.broker.models import load, load_adapter
from mlx_swarm.broker.trace import events
from tests.engine.driver import Driver, assert_greedy
from tests.engine.test_shared import KINDS, FailingModel, model_of, with_model
from tests.models.tiny_adapter import write_adapter
from tests.tiny_broker import SHARED, TINY, prompt


def alone(request: Request, kind: str = "llama") -> tuple[list[int], str]:
    """What a request gets with nobody beside it."""
    driver = Driver(model_of(kind))
    box = driver.submit(request)
    driver.run()
    assert box.end is not None
    return box.tokens, box.end.text


def test_09_an_adapter_never_reads_what_another_one_under_its_name_computed(
    tmp_path: Path,
) -> None:
    chance, driver = random.Random(9), Driver(load(TINY))
    base, asked = driver.engine.model, [Request(tokens=prompt(agent)) for agent in range(3)]
    folders = [write_adapter(tmp_path / str(n), base.model, seed=n) for n in (1, 2, 3)]
    oracles = [load_adapter(base, folder) for folder in folders]
    known: set[int] = set()
    for _ in range(12):
        number = chance.randrange(3)
        driver.engine.load("legal", ModelSource(str(folders[number]), base=base.name))
        mine = [Request(tokens=each.tokens, model="legal", max_tokens=4) for each in asked]
        plain = [Request(tokens=each.tokens, max_tokens=4) for each in asked]
        first = len(driver.boxes)
        driver.stagger([each for pair in zip(mine, plain, strict=True) for each in pair], lambda: 2)
        for at, box in enumerate(driver.boxes[first:]):
            model = base if at % 2 else oracles[number]
            assert_greedy(model, asked[at // 2].tokens, box.tokens)
        end = driver.boxes[first].end
        assert end is not None
        assert (end.usage.ram_tokens > 0) is (number in known)
        known.add(number)
        driver.engine.unload("legal")
    driver.check_idle()


def test_18_a_request_that_finds_no_memory_ends_alone_with_the_numbers() -> None:
    model = model_of("llama")
    failing = FailingModel(model.model)
    limit = weight_bytes(model) + 500 * 3 * 2 * 2 * 16 * 4
    driver = Driver(with_model(model, failing), memory=limit)
    running = [driver.submit(Request(tokens=prompt(at), max_tokens=40)) for at in range(2)]
    driver.decode_all(running, 3)
    refused = driver.submit(Request(tokens=[5] * 300, max_tokens=210))
    driver.decode_all(running, 6)
    assert isinstance(refused.error, OutOfMemory)
    assert re.search(r"300 prompt tokens and up to 210 .* KiB", str(refused.error))
    failing.left = 1
    unlucky = driver.submit(Request(tokens=[6] * 40, max_tokens=4, cache=False))
    driver.run()
    assert any(isinstance(box.error, EngineFailed) for box in (*running, unlucky))
    for box, agent in zip(running, range(2), strict=True):
        assert_greedy(model, prompt(agent), box.tokens)
    again = driver.submit(Request(tokens=prompt(0), max_tokens=8))
    driver.run()
    assert_greedy(model, prompt(0), again.tokens)
    assert len(again.tokens) == 8
    driver.check_idle()


def test_20_what_is_cached_and_what_runs_never_exceed_one_limit_together() -> None:
    model = model_of("llama")
    token = 3 * 2 * 2 * 16 * 4
    limit = weight_bytes(model) + 600 * token
    driver = Driver(model, ram=500 * token, memory=limit, max_rows=6)
    asked = [Request(tokens=[agent + 3] * 90, max_tokens=1) for agent in range(5)]
    asked += [Request(tokens=[agent + 20] * 90, max_tokens=60) for agent in range(8)]
    for request in asked[:5]:
        driver.submit(request)
    driver.run()
    full = driver.engine.cache.total_bytes
    assert full >= 400 * token
    for request in asked[5:]:
        driver.submit(request)
    least = full
    while driver.engine.turn():
        memory, cache = driver.engine.statistics().memory, driver.engine.cache
        taken = sum(memory.committed.values()) + sum(memory.reserved.values())
        assert taken == limit - memory.free <= limit
        assert memory.committed["extents"] == cache.statistics().total.extent_bytes
        least = min(least, cache.total_bytes)
    assert least < full / 2, "who runs takes the room of what is only kept"
    for request, box in zip(asked, driver.boxes, strict=True):
        assert_greedy(model, request.tokens, box.tokens)
        assert len(box.tokens) == request.max_tokens
    driver.check_idle()


def test_23_between_two_tokens_of_a_running_row_no_more_than_a_chunk_is_computed() -> None:
    driver = Driver(model_of("llama"), chunk=32)
    running = driver.submit(Request(tokens=[5, 6, 7], max_tokens=120))
    driver.decode_all([running], 2)
    for agent in range(3):
        driver.submit(Request(tokens=[agent + 3] * 300, max_tokens=2))
    driver.run()
    between, most = 0, 0
    for event in driver.recorder.events():
        if isinstance(event, events.PrefillChunk):
            between += event.stop - event.start
        elif isinstance(event, events.DecodeStep):
            most, between = max(most, between), 0
    assert 0 < most <= 32
    driver.check_idle()


def test_25_rows_keep_their_own_stops_when_the_batch_changes() -> None:
    free = Request(tokens=prompt(0), max_tokens=40, sampling=Sampling(temperature=1.5, seed=4))
    text = alone(free)[1]
    pieces = [text[at : at + 2] for at in range(4, len(text) - 2, 3)][:6]
    asked = [
        Request(tokens=prompt(0), max_tokens=40, sampling=free.sampling, stop=(piece,))
        for piece in pieces
    ]
    driver = Driver(model_of("llama"))
    boxes = driver.stagger([free, *asked], lambda: 5)
    for request, box in zip([free, *asked], boxes, strict=True):
        assert box.end is not None
        assert box.end.text == alone(request)[1]
        assert not any(stop in box.end.text for stop in request.stop)
    assert len({box.end and box.end.text for box in boxes}) > 2
    driver.check_idle()


def everything(agent: int) -> Request:
    """A request with every feature of sampling on, its own values of each."""
    return Request(
        tokens=prompt(agent % 3, own=4 + agent),
        max_tokens=10 + agent,
        sampling=Sampling(
            temperature=0.7 + agent / 10,
            top_p=0.95,
            top_k=40 + agent,
            min_p=0.01,
            xtc_probability=0.4,
            xtc_threshold=0.02,
            seed=agent,
            logit_bias={100 + agent: 2.0},
            repetition_penalty=1.1 + agent / 50,
            repetition_context_size=0,
            presence_penalty=0.3,
            frequency_penalty=0.2 + agent / 20,
            min_tokens=4,
        ),
        grammar=Grammar(regex=f"[a-z{agent}]{{3,}}(-[A-Z]+)*") if agent % 2 else None,
        stop=("q", str(agent)),
        logprobs=True,
        top_logprobs=1 + agent % 4,
        prompt_logprobs=True,
        boundaries=(len(SHARED),),
    )


def test_25_rows_with_every_feature_on_are_as_alone_whoever_joins_and_leaves() -> None:
    chance, asked = random.Random(25), [everything(agent) for agent in range(10)]
    driver = Driver(model_of("llama"), max_rows=5, chunk=16)
    for request in asked:
        driver.submit(request)
        driver.run(chance.randint(0, 4))
        driver.preempt(chance.randrange(len(driver.boxes)))
        gone = driver.submit(Request(tokens=prompt(chance.randrange(3)), max_tokens=30))
        driver.run(chance.randint(0, 3))
        driver.cancel(driver.boxes.index(gone))
    driver.run()
    for request, box in zip(asked, driver.boxes[::2], strict=True):
        assert box.end is not None, box.error
        single = Driver(model_of("llama"), max_rows=1)
        expected = single.submit(request)
        single.run()
        assert expected.end is not None
        assert (box.end.text, box.tokens) == (expected.end.text, expected.tokens)
        found = [*box.logprobs, *box.end.prompt_logprobs[1:]]
        wanted = [*expected.logprobs, *expected.end.prompt_logprobs[1:]]
        for one, other in zip(found, wanted, strict=True):
            assert one is not None
            assert other is not None
            assert one.token == other.token
            assert abs(one.logprob - other.logprob) < 1e-3
            assert len(one.top) == request.top_logprobs
    driver.check_idle()


@pytest.mark.parametrize("preempted", [False, True])
def test_26_penalties_and_grammars_see_what_was_cached_and_what_came_before_a_pause(
    preempted: bool,
) -> None:
    model, wanted = model_of("llama"), SHARED[7]
    others = Sampling(
        logit_bias={wanted: 50.0, SHARED[8]: 40.0, 255: 30.0},
        presence_penalty=45.0,
        presence_context_size=0,
    )
    asked = [
        Request(tokens=SHARED, max_tokens=3, sampling=others),
        Request(tokens=SHARED, max_tokens=12, grammar=Grammar(regex="[ab]{5}-[0-9]{4}")),
    ]
    driver = Driver(model)
    driver.submit(Request(tokens=SHARED, max_tokens=1))
    driver.run()
    boxes = [driver.submit(request) for request in asked]
    for tokens in range(1, 9 if preempted else 0):
        driver.decode_all(boxes[1:], tokens)
        driver.preempt(1)
        driver.preempt(2)
    driver.run()
    for request, box in zip(asked, boxes, strict=True):
        assert box.end is not None, box.error
        assert box.end.usage.ram_tokens == len(SHARED) - 1
        assert box.tokens == alone(request)[0]
    # All that the bias favours is in the prompt but one, which is in the output from then on.
    assert boxes[0].tokens[0] == 255
    assert boxes[1].end is not None
    assert re.fullmatch("[ab]{5}-[0-9]{4}", boxes[1].end.text)
    driver.check_idle()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_27_distinct_tails_on_one_donor_do_not_leak_into_each_other(kind: str) -> None:
    model = model_of(kind)
    driver = Driver(model, max_rows=12)
    driver.submit(Request(tokens=[*SHARED, 5], max_tokens=1))
    driver.run()
    asked = [Request(tokens=prompt(agent, own=1 + agent), max_tokens=8) for agent in range(12)]
    boxes = [driver.submit(each) for each in asked]
    driver.run()
    for request, box in zip(asked, boxes, strict=True):
        assert box.tokens == alone(request, kind)[0]
        assert_greedy(model, request.tokens, box.tokens)
    driver.check_idle()


def test_28_what_cannot_be_batched_neither_drains_the_batch_nor_blocks_admission() -> None:
    driver = Driver(load(TINY), max_rows=4)
    running = driver.submit(Request(tokens=prompt(0), max_tokens=80))
    driver.decode_all([running], 2)
    serial = driver.submit(Request(tokens=prompt(1), max_tokens=60, deterministic=True))
    driver.decode_all([serial], 3)
    assert not running.over
    assert len(running.tokens) < 40
    late = driver.submit(Request(tokens=prompt(2), max_tokens=4))
    driver.decode_all([late], 4)
    assert not running.over
    assert not serial.over
    driver.run()
    assert (len(running.tokens), len(serial.tokens)) == (80, 60)
    driver.check_idle()


def test_31_rows_that_name_no_seed_differ_even_at_the_same_instant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for clock in ("time", "monotonic", "perf_counter"):
        monkeypatch.setattr(time, clock, lambda: 1.0)
    for clock in ("time_ns", "monotonic_ns", "perf_counter_ns"):
        monkeypatch.setattr(time, clock, lambda: 10**9)
    request = Request(tokens=prompt(0), max_tokens=12, sampling=Sampling(temperature=1.5))
    texts = []
    for _ in range(2):
        driver = Driver(model_of("llama"), clock=lambda: 1.0)
        boxes = [driver.submit(request) for _ in range(6)]
        driver.run()
        texts += [tuple(box.tokens) for box in boxes]
    assert len(set(texts)) == 12


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mamba2"])
def test_34_what_an_aborted_request_had_half_written_is_never_served(kind: str) -> None:
    model = model_of(kind)
    request = Request(tokens=[*SHARED, *range(20, 90)], max_tokens=6)
    for turns in range(1, 16):
        driver = Driver(model, chunk=16)
        driver.submit(request)
        driver.run(turns)
        driver.cancel(0)
        kept = driver.engine.cache.plan(request.tokens, _namespace(driver)).ram_tokens
        again = driver.submit(request)
        driver.run()
        assert again.end is not None
        assert again.end.usage.ram_tokens == kept
        assert_greedy(model, request.tokens, again.tokens)
        driver.check_idle()


def test_37_what_rests_too_long_leaves_memory_and_stays_reachable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "LOOK_SECONDS", 0.0)
    driver = Driver(model_of("llama"))
    looked: list[float] = []
    monkeypatch.setattr(driver.engine.cache, "demote_idle", looked.append)
    driver.submit(Request(tokens=prompt(1), max_tokens=2))
    while driver.engine.turn():
        assert not looked
    assert looked == [loop.IDLE_SECONDS]


def test_44_a_second_thread_that_touches_what_mlx_made_fails_at_once() -> None:
    guard, caught = ThreadGuard(), list[AssertionError]()
    guard.check()

    def touch() -> None:
        with pytest.raises(AssertionError, match="called from thread") as error:
            guard.check()
        caught.append(error.value)

    thread = threading.Thread(target=touch)
    thread.start()
    thread.join()
    assert len(caught) == 1


def _namespace(driver: Driver) -> str:
    return next(iter(driver.engine.cache.statistics().namespaces), "")
