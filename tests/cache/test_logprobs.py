"""Log-probabilities beside stored KV: what they cost, what becomes usable, what is refused."""

import numpy as np
import pytest

from mlx_swarm.broker.cache.ledger import Ledger, Purpose
from mlx_swarm.broker.cache.prompt_cache import PromptCache
from mlx_swarm.broker.errors import CacheError
from tests.cache.helpers import TOKEN_BYTES, put, sequence
from tests.cache.rows import Array, build, logprobs_of

TOKENS = sequence(1, 20)
WHOLE = 20 * TOKEN_BYTES


def test_what_is_stored_without_gets_them_at_exactly_their_bytes() -> None:
    ledger = Ledger(1 << 30)
    cache = PromptCache(1 << 20, ledger=ledger)
    put(cache, TOKENS)
    assert cache.plan([*TOKENS, 7], "", 0).reason == "no_logprobs"
    caches = build("full", TOKENS)
    stored = cache.put(TOKENS, caches, logprobs=logprobs_of(TOKENS))
    assert (stored.new_tokens, stored.new_bytes) == (0, 4 * 20)
    assert cache.put(TOKENS, caches, logprobs=logprobs_of(TOKENS)).new_bytes == 0
    assert cache.total_bytes == ledger.used(Purpose.EXTENTS) == WHOLE + 4 * 20
    plan = cache.plan([*TOKENS, 7], "", 0)
    assert (plan.ram_tokens, plan.reason) == (19, "cold_start")
    assert cache.plan([*TOKENS, 7]).ram_tokens == 20
    assert cache.plan([*TOKENS, 7], "", 1).reason == "no_logprobs"
    cache.clear()
    assert cache.total_bytes == ledger.used(Purpose.EXTENTS) == 0


def test_half_of_them_make_half_usable() -> None:
    cache = PromptCache(1 << 20)
    logprobs = logprobs_of(TOKENS)
    logprobs[10] = np.nan
    cache.put(TOKENS, build("full", TOKENS), logprobs=logprobs)
    plan = cache.plan(TOKENS, "", 0)
    assert (plan.ram_tokens, plan.reason) == (9, "no_logprobs")
    cache.put(TOKENS[:12], build("full", TOKENS[:12]), logprobs=logprobs_of(TOKENS[:12]))
    plan = cache.plan(TOKENS, "", 0)
    assert (plan.ram_tokens, plan.reason) == (19, None)
    cache.check_integrity()


def test_a_lease_has_a_copy_of_those_of_its_tokens_and_of_the_next_one() -> None:
    cache = PromptCache(1 << 20)
    cache.put(TOKENS, build("full", TOKENS), logprobs=logprobs_of(TOKENS))
    prompt = [*TOKENS[:12], 99, 98]
    for _ in range(2):
        with cache.take(prompt, "", 0) or pytest.fail("nothing taken") as lease:
            assert lease.length == 11
            assert lease.logprobs is not None
            assert lease.logprobs.tolist() == logprobs_of(TOKENS)[:12].tolist()
            lease.logprobs[:] = 1.0
    with cache.take(prompt) or pytest.fail("nothing taken") as lease:
        assert (lease.length, lease.logprobs) == (12, None)
    cache.check_integrity()


def test_a_sequence_is_stored_without_where_there_is_no_room_for_both() -> None:
    cache = PromptCache(WHOLE)
    assert cache.put(TOKENS, build("full", TOKENS), logprobs=logprobs_of(TOKENS)).stored
    assert cache.total_bytes == WHOLE
    assert cache.plan(TOKENS).ram_tokens == 19
    assert cache.plan(TOKENS, "", 0).reason == "no_logprobs"
    cache.check_integrity()


@pytest.mark.parametrize("logprobs", [np.zeros(19, np.float32), np.zeros(20)])
def test_wrong_ones_are_refused_with_the_numbers(logprobs: Array) -> None:
    cache = PromptCache(1 << 20)
    count, kind = len(logprobs), logprobs.dtype
    with pytest.raises(CacheError, match=f"{count} log-probabilities of {kind} for 20 tokens"):
        cache.put(TOKENS, build("full", TOKENS), logprobs=logprobs)
    assert cache.total_bytes == 0
