"""Models whose caches no batch takes: in the serial lane they give mlx-lm's tokens, and share
prefixes as far as their codecs go.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.models import cache as stock
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

from mlx_swarm.broker import Request, Sampling
from mlx_swarm.broker.engine.replicated import unbatchable
from mlx_swarm.broker.engine.sampling import RowSampler
from mlx_swarm.broker.models import LoadedModel, load
from tests.engine.driver import TIE, assert_greedy
from tests.engine.serial_driver import SerialDriver, alone, tokens_of
from tests.engine.test_shared import with_model
from tests.engine.tiny_models import VOCABULARY, WINDOW, tiny_model
from tests.tiny_broker import SHARED

WIDE = "hidden=128&heads=4&kv_heads=2&intermediate=64&context=512&seed=3"
PROMPT = [3 + (7 * at + at * at % 11) % (VOCABULARY - 5) for at in range(50)]


class Opaque(KVCache):  # type: ignore[misc]
    """A cache class that no codec knows."""

    merge = property()  # looking it up raises AttributeError


@functools.cache
def model_of(kind: str) -> LoadedModel:
    """A model, loaded once."""
    if kind == "chunks":
        return llama4()
    model = load(f"synthetic:llama?layers=3&{WIDE}")
    changed = with_model(model, model.model)
    changed.make_caches = MAKERS[kind](model.make_caches)  # type: ignore[method-assign]
    return changed


def llama4() -> LoadedModel:
    """Layers of chunks of 8 tokens and one of all tokens, of the tokens 0 to 127."""
    model = load("synthetic:llama?layers=1&hidden=64&context=512")
    changed = with_model(model, tiny_model("llama4"))
    changed.config = {**model.config, "vocab_size": VOCABULARY}
    return changed


Makers = Callable[[], list[Any]]
MAKERS: dict[str, Callable[[Makers], Makers]] = {
    "quantised": lambda make: lambda: [each.to_quantized(group_size=32) for each in make()],
    "opaque": lambda make: lambda: [Opaque() for _ in make()],
}
KINDS = ["chunks", "quantised", "opaque"]
ROUNDED = 1e-2
KNOWN = ["chunks", "quantised"]


def check_tokens(model: LoadedModel, prompt: list[int], tokens: list[int]) -> None:
    """Assert that tokens are greedy ones of the model on its own caches, ties excepted."""
    # Sums in another order can round a quantised number to its neighbour.
    assert_greedy(model, prompt, tokens, ROUNDED if model is model_of("quantised") else TIE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_cannot_be_batched_says_so_and_gives_mlx_lm_s_tokens(kind: str) -> None:
    model = model_of(kind)
    driver = SerialDriver(model)
    assert "cannot be batched with history" in driver.batch.unbatchable
    for request in (Request(tokens=PROMPT, max_tokens=20), Request(tokens=[5], max_tokens=5)):
        received = driver.run(request)
        check_tokens(model, list(request.tokens), tokens_of(received))
        assert received[-1].finish_reason


@pytest.mark.parametrize("kind", KNOWN)
def test_the_next_turn_hits_to_the_last_token_and_a_fork_to_where_it_parts(kind: str) -> None:
    model = model_of(kind)
    driver = SerialDriver(model)
    first = tokens_of(driver.run(Request(tokens=PROMPT, max_tokens=6)))
    for prompt, hit in (
        ([*PROMPT, *first, 9, 8, 7], len(PROMPT) + len(first)),
        ([*PROMPT[:47], 4, 4, 5], 47),
    ):
        row = driver.opened(Request(tokens=prompt, max_tokens=8))
        if kind == "chunks" and hit == 47:
            # What layers of chunks have let go of, they cannot go back to.
            hit = row.position
        assert row.position == row.ram_tokens == hit
        check_tokens(model, prompt, tokens_of(driver.finish(row)))
        driver.lane.keep(row)
        driver.check_idle()


def test_a_class_without_a_codec_is_computed_anew() -> None:
    driver = SerialDriver(model_of("opaque"))
    for _ in range(2):
        row = driver.joined(Request(tokens=PROMPT, max_tokens=6))
        assert tokens_of(driver.decode()) == alone(model_of("opaque"), PROMPT, 6).tokens
        assert driver.lane.keep(row) == 0
    driver.check_idle()
    assert driver.cache.total_bytes == 0


@pytest.mark.parametrize("kind", KNOWN)
@settings(deadline=None, max_examples=8, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_requests_in_turn_give_mlx_lm_s_tokens_under_the_byte_cap(
    kind: str, data: st.DataObject
) -> None:
    """However little the cache may hold, and wherever prompts part or rows are cancelled."""
    model = model_of(kind)
    driver = SerialDriver(
        model,
        ram=data.draw(st.sampled_from([0, 20_000, 100_000, 64 << 20])),
        chunk=data.draw(st.sampled_from([5, 16, 64])),
    )
    said: list[list[int]] = [[]]
    for _ in range(data.draw(st.integers(1, 6))):
        before = data.draw(st.sampled_from(said))
        shared = before[: data.draw(st.integers(0, len(before)))]
        own = data.draw(st.lists(st.integers(3, VOCABULARY - 1), min_size=1, max_size=30))
        prompt = [*shared, *own]
        row = driver.joined(Request(tokens=prompt, max_tokens=data.draw(st.integers(1, 12))))
        received = tokens_of(driver.decode(data.draw(st.sampled_from([0, 1, 5, 100]))))
        check_tokens(model, prompt, received)
        driver.lane.keep(row)
        driver.check_idle()
        said.append([*prompt, *received])


def test_a_row_is_sampled_as_it_asks() -> None:
    model = model_of("chunks")
    sampling = Sampling(temperature=1.0, seed=7)
    received = SerialDriver(model).run(Request(tokens=PROMPT, max_tokens=12, sampling=sampling))
    assert tokens_of(received) == alone(model, PROMPT, 12, RowSampler(sampling, 7)).tokens


def test_the_memory_of_a_row_is_known_where_its_caches_are() -> None:
    quantised = SerialDriver(model_of("quantised"))
    row = quantised.joined(Request(tokens=SHARED, max_tokens=6))
    quantised.decode(1)
    one = quantised.lane.kv_bytes(1, 0)
    assert quantised.lane.kv_bytes(100, 40) == 100 * one > 0
    held = sum(cache.nbytes for cache in row.caches)
    assert held == 256 * one, "mlx-lm's class grows by so many tokens"
    assert SerialDriver(model_of("opaque")).lane.kv_bytes(100, 0) == 0


@pytest.mark.parametrize(
    ("caches", "reason"),
    [
        ([KVCache(), RotatingKVCache(8), stock.ArraysCache(2)], ""),
        ([CacheList(KVCache(), stock.ArraysCache(1))], ""),
        ([KVCache(), stock.QuantizedKVCache()], "QuantizedKVCache cannot be batched with history"),
        ([stock.ChunkedKVCache(WINDOW)], "ChunkedKVCache cannot"),
        ([stock.ConcatenateKVCache()], "ConcatenateKVCache cannot"),
        ([KVCache(), CacheList(KVCache(), stock.ChunkedKVCache(8))], "ChunkedKVCache cannot"),
        ([RotatingKVCache(8, keep=4)], "RotatingKVCache that keeps its first 4 tokens"),
    ],
)
def test_which_classes_of_mlx_lm_need_the_lane(caches: list[Any], reason: str) -> None:
    found = unbatchable(caches)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)
