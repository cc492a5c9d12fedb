"""Sessions over the real engine: less is computed, outputs stay, pins and hints hold and end."""

import math
from collections import deque

import pytest

from mlx_swarm.broker import CacheError, Request
from mlx_swarm.broker.engine.fairness import Party
from mlx_swarm.broker.engine.session_keeper import SHARE
from mlx_swarm.broker.models import LoadedModel, load, namespace_digest
from mlx_swarm.broker.trace import events
from tests.engine.driver import Driver
from tests.tiny_broker import SHARED, TINY

PER_TOKEN = 2 * 2 * 2 * 16 * 4
"""Bytes of KV: keys and values of 2 layers with 2 heads of 16 float32."""

OWN = 40
OUTPUT = 4


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load(TINY)


def ask(agent: int, prompt: list[int], next_use: float | None = None) -> Request:
    return Request(
        tokens=prompt, max_tokens=OUTPUT, agent=f"agent-{agent}", swarm="s", next_use=next_use
    )


def opening(agent: int, own: int = OWN) -> list[int]:
    """A first prompt, all of its own but for what everybody shares."""
    return [*SHARED[:20], *((agent * 37 + 5 * at) % 240 + 10 for at in range(own))]


def party(agent: int) -> Party:
    return Party("", "s", f"agent-{agent}")


def ram(sessions: int, turns: int) -> int:
    """Bytes for the conversations of so many sessions."""
    return math.ceil((20 + sessions * turns * (OWN + OUTPUT)) * PER_TOKEN / SHARE)


def converse(driver: Driver, sessions: int, turns: int) -> tuple[dict[int, list[int]], int]:
    """Round-robin turns of many sessions: each asks again at once. Texts, and tokens prefilled."""
    prompts = {agent: opening(agent) for agent in range(sessions)}
    left = dict.fromkeys(prompts, turns)
    open_ = deque((agent, driver.submit(ask(agent, prompts[agent]))) for agent in prompts)
    while open_:
        driver.run(1)
        for agent, box in [each for each in open_ if each[1].over]:
            assert box.error is None
            open_.remove((agent, box))
            left[agent] -= 1
            prompts[agent] += box.tokens
            if left[agent]:
                prompts[agent] += opening(agent + 50 * left[agent])[20:]
                hint = None if left[agent] > 1 else math.inf
                open_.append((agent, driver.submit(ask(agent, prompts[agent], hint))))
    driver.check_idle()
    return prompts, driver.engine.statistics().usage.prefilled_tokens


def test_more_sessions_than_fit_compute_less_and_say_the_same(model: LoadedModel) -> None:
    limited = Driver(model, ram=ram(4, 3), max_rows=2)
    texts, prefilled = converse(limited, 12, 3)
    statistics = limited.engine.statistics().sessions
    assert (statistics.admitted, statistics.waiting, statistics.bytes) == (0, 0, 0)
    assert not limited.engine.sessions.policy._table
    assert any(isinstance(event, events.Deferred) for event in limited.recorder.events())
    unlimited = Driver(model, ram=ram(4, 3), max_rows=2)
    unlimited.engine.sessions.policy.budget = math.inf
    expected, more = converse(unlimited, 12, 3)
    assert texts == expected
    assert prefilled < more


def test_working_sets_are_measured_with_what_is_shared_once(model: LoadedModel) -> None:
    driver = Driver(model)
    for agent in range(3):
        driver.submit(ask(agent, opening(agent)))
    driver.run()
    held = driver.engine.statistics()
    assert held.sessions.admitted == 3
    assert held.sessions.bytes == (20 + 3 * (OWN + OUTPUT)) * PER_TOKEN
    assert held.sessions.bytes == held.cache.total.total_bytes


def test_a_session_that_has_ended_leaves_first(model: LoadedModel) -> None:
    driver = Driver(model, ram=ram(2, 1))
    for agent, hint in ((0, None), (1, math.inf)):
        driver.submit(ask(agent, opening(agent), hint))
        driver.run()
    assert driver.engine.statistics().sessions.admitted == 1
    driver.submit(Request(tokens=opening(2), max_tokens=OUTPUT))
    driver.run()
    cache, namespace = driver.engine.cache, namespace_digest(model.identity)
    assert cache.peek_prefix_len(opening(0), namespace) == len(opening(0)) - 1
    assert cache.peek_prefix_len(opening(1), namespace) == 20


def test_of_a_swarm_that_has_ended_nothing_is_remembered(model: LoadedModel) -> None:
    driver = Driver(model)
    for agent in range(3):
        driver.submit(ask(agent, opening(agent)))
    driver.run()
    keeper = driver.engine.sessions
    keeper.next_use(Party("", "another"), math.inf)
    assert keeper.statistics().admitted == 3
    keeper.next_use(Party("", "s"), math.inf)
    assert keeper.statistics().admitted == 0


def test_a_pin_keeps_what_was_said_last_until_it_ends(model: LoadedModel) -> None:
    driver = Driver(model, ram=ram(4, 1))
    keeper, cache = driver.engine.sessions, driver.engine.cache
    namespace = namespace_digest(model.identity)
    assert keeper.pin(party(0), 60.0) == 0
    driver.submit(ask(0, opening(0)))
    driver.run()
    said = len(opening(0)) + OUTPUT
    assert keeper.pin(party(0), 60.0) == said
    assert keeper.statistics().pins == 1
    for agent in range(1, 9):
        driver.submit(Request(tokens=opening(agent), max_tokens=OUTPUT))
        driver.run()
    assert cache.peek_prefix_len(opening(0), namespace) == len(opening(0)) - 1
    keeper.unpin(party(0))
    keeper.unpin(party(0))
    keeper.next_use(party(0), math.inf)
    assert keeper.statistics().pins == 0
    assert cache.statistics().total.pinned_bytes == 0
    for agent in range(11, 19):
        driver.submit(Request(tokens=opening(agent), max_tokens=OUTPUT))
        driver.run()
    assert cache.peek_prefix_len(opening(0), namespace) == 20
    driver.check_idle()


def test_a_pin_too_many_is_refused_and_counted(model: LoadedModel) -> None:
    driver = Driver(model, ram=ram(4, 1))
    keeper = driver.engine.sessions
    for agent in range(3):
        driver.submit(ask(agent, opening(agent)))
        driver.run()
    keeper.pin(party(0), 60.0)
    keeper.pin(party(1), 60.0)
    with pytest.raises(CacheError, match="the limit is"):
        keeper.pin(party(2), 60.0)
    assert (keeper.statistics().pins, keeper.statistics().pins_refused) == (2, 1)
    (refused,) = [e for e in driver.recorder.events() if isinstance(e, events.PinRefused)]
    assert refused.agent == "agent-2"
    keeper.unpin(party(0))
    assert keeper.pin(party(2), 60.0)


def test_two_that_pin_the_same_do_not_unpin_each_other(model: LoadedModel) -> None:
    driver = Driver(model)
    keeper, cache = driver.engine.sessions, driver.engine.cache
    for agent in (0, 1):
        driver.submit(ask(agent, opening(0)))
        driver.run()
        keeper.pin(party(agent), 60.0)
    found = [*opening(0), *driver.boxes[0].tokens]
    namespace = namespace_digest(model.identity)
    for agent, stays in ((0, True), (1, False)):
        keeper.unpin(party(agent))
        entry = cache.find_exact(found, namespace)
        assert entry is not None
        assert entry.pinned is stays
