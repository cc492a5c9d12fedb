"""What was stored comes back bit by bit: every cache class, every dtype, another process."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_swarm.broker.cache.extents import ExtentRange
from mlx_swarm.broker.cache.kinds import materialise
from mlx_swarm.broker.cache.prompt_cache import PromptCache
from mlx_swarm.broker.cache.ssd import SsdStore, header, pieces, reader
from mlx_swarm.broker.cache.ssd.disk import Disk
from mlx_swarm.broker.cache.ssd.reader import Reader
from tests.cache.helpers import put, taken
from tests.cache.rows import FAMILIES, STATEFUL
from tests.cache.ssd.folders import CAP, RAM, SECONDS, files, headers, identical, store_all
from tests.engine.tiny_models import tiny_model

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
HEADS, DIM = 2, 64

KINDS: dict[str, Callable[[], list[Any]]] = {
    "full": lambda: [KVCache(), KVCache()],
    "concatenate": lambda: [ConcatenateKVCache()],
    "ring": lambda: [RotatingKVCache(16), KVCache()],
    "ring with kept tokens": lambda: [RotatingKVCache(16, keep=3)],
    "chunked": lambda: [ChunkedKVCache(16)],
    "quantized": lambda: [QuantizedKVCache(64, bits) for bits in (2, 3, 4, 6, 8)],
    "arrays": lambda: [ArraysCache(4), KVCache()],
    "arrays alone": lambda: [ArraysCache(1), ArraysCache(3)],
    "list": lambda: [CacheList(KVCache(), ArraysCache(2)), RotatingKVCache(16)],
}


@pytest.mark.parametrize("length", [7, 16, 41], ids=["before", "at", "after wrapping"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_comes_back_bit_by_bit(tmp_path: Path, kind: str, dtype: mx.Dtype, length: int) -> None:
    tokens = list(range(length))
    caches = KINDS[kind]()
    for start in range(0, length, 5):
        _fill(caches, min(5, length - start), dtype)
    expected = materialise(caches)
    with SsdStore(tmp_path, CAP) as store:
        cache = PromptCache(RAM, cold=store)
        cache.put(tokens, caches)
        assert cache.flush(SECONDS) == (0, 0)
    with SsdStore(tmp_path, CAP) as store:
        cache = PromptCache(RAM, cold=store)
        with cache.take([*tokens, 7]) or pytest.fail("nothing taken") as lease:
            assert (lease.ram_tokens, lease.cold_tokens) == (0, length)
            assert identical(materialise(lease.caches), expected)
        assert cache.statistics().total.restore_failures == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_every_usable_length_comes_back(tmp_path: Path, family: str) -> None:
    stem, ends = list(range(20)), ([50, 51, 52], list(range(60, 90)))
    store_all(tmp_path, [stem, *([*stem, *end] for end in ends)], family)
    with SsdStore(tmp_path, CAP) as store:
        for end in ends:
            for length in range(1, 20 + len(end)):
                prompt = [*stem, *end][: length + 1]
                cache = PromptCache(RAM, cold=store)
                plan = cache.plan(prompt)
                assert taken(cache, prompt, family) == plan.cold_tokens
                if family not in STATEFUL and family not in ("window", "window_keep", "chunked"):
                    assert plan.cold_tokens == length
                cache.check_integrity()
            prompt = [*stem, *end, 7]
            assert taken(PromptCache(RAM, cold=store), prompt, family) == len(prompt) - 1


@pytest.mark.parametrize("block_bytes", [1, 500, 3000])
def test_blocks_of_any_size(
    tmp_path: Path, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(header, "BLOCK_BYTES", block_bytes)
    for family in FAMILIES:
        store_all(tmp_path / family, [range(40)], family)
        with SsdStore(tmp_path / family, CAP) as store:
            cache = PromptCache(RAM, cold=store)
            assert taken(cache, [*range(40), 7], family) == 40
            if family == "full":
                assert taken(PromptCache(RAM, cold=store), [*range(23), 99], family) == 23


@pytest.mark.parametrize("family", FAMILIES)
def test_also_where_the_host_cannot_read_what_the_device_holds(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (pieces, reader):
        monkeypatch.setattr(module, "is_host_memory", lambda: False)
    stem = list(range(20))
    store_all(tmp_path, [[*stem, 50, 51], [*stem, 60, 61, 62]], family)
    with SsdStore(tmp_path, CAP) as store:
        cache = PromptCache(RAM, cold=store)
        for prompt in ([*stem, 50, 51, 7], [*stem, 60, 61, 62, 7]):
            assert taken(cache, prompt, family) == len(prompt) - 1


def test_what_is_read_whole_is_asked_for_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(Disk, "expect", lambda self, path: asked.append(path))
    store_all(tmp_path, [range(100), [*range(100), 7, 8]])
    with SsdStore(tmp_path, CAP) as store:
        assert taken(PromptCache(RAM, cold=store), [*range(20), 9]) == 20
        assert not asked
        assert taken(PromptCache(RAM, cold=store), [*range(100), 7, 8, 9]) == 102
    assert {*asked} == {*files(tmp_path)}


def test_a_shared_prefix_is_on_disk_once(tmp_path: Path) -> None:
    prefix = list(range(200))
    store_all(tmp_path, [prefix, *([*prefix, agent, 7] for agent in range(1000, 1100))])
    assert sum(len(each.tokens) // 4 for each in headers(tmp_path)) == 200 + 100 * 2


def test_only_what_ram_lacks_is_read_and_becomes_an_extent_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_all(tmp_path, [range(100)])
    rows: list[Any] = []
    read = Reader.read

    def noted(*given: Any) -> Any:
        rows.append(read(*given))
        return rows[-1]

    monkeypatch.setattr(Reader, "read", noted)
    with SsdStore(tmp_path, CAP) as store:
        cache = PromptCache(RAM, cold=store)
        put(cache, range(60))
        size = store.find(np.arange(100, dtype=np.uint32), "", 60)
        assert size is not None
        assert size.bytes == 40 * cache.total_bytes // 60
        assert taken(cache, [*range(100), 7]) == 100
        node = cache.tree().walk(range(100)).path[-1]
        assert isinstance(node.span, ExtentRange)
        assert (node.start, node.stop) == (60, 100)
        assert node.span.extent is rows[0].cut(60, 100)


def test_what_was_read_is_of_no_use_once_ram_lost_what_it_continues(tmp_path: Path) -> None:
    store_all(tmp_path, [range(100)])
    with SsdStore(tmp_path, CAP) as store:
        cache = PromptCache(RAM, cold=store)
        put(cache, range(60))
        restoration = cache.restoration([*range(100), 7])
        assert restoration is not None
        cache.clear()
        restoration.run()
        assert cache.lease([*range(100), 7], "", restoration) is None
        assert taken(cache, [*range(100), 7]) == 100
        assert store.statistics().quarantined == 0


def test_window_layers_hang_on_files_that_have_what_they_need(tmp_path: Path) -> None:
    """The longer sequence's file has the first token, but not for the window layers."""
    longer, shorter = list(range(30)), [0, 50, 51, 52, 53]
    store_all(tmp_path, [longer], "window")
    store_all(tmp_path, [shorter], "window")
    with SsdStore(tmp_path, CAP) as store:
        for tokens in (longer, shorter):
            cache = PromptCache(RAM, cold=store)
            assert taken(cache, [*tokens, 7], "window") == len(tokens)


def test_a_namespace_never_serves_another(tmp_path: Path) -> None:
    store_all(tmp_path, [range(40)], namespace="one")
    with SsdStore(tmp_path, CAP) as store:
        cache = PromptCache(RAM, cold=store)
        assert cache.plan([*range(40), 7], "two").usable_tokens == 0
        assert taken(cache, [*range(40), 7], namespace="one") == 40


CONTINUE = """
import sys
from pathlib import Path
from mlx_swarm.broker.cache.ssd import SsdStore
from tests.cache.ssd.test_round_trip import continued
with SsdStore(Path(sys.argv[1]), 1 << 30) as store:
    print(continued(sys.argv[2], store))
"""


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mamba2"])
def test_a_new_process_goes_on_with_the_same_tokens(tmp_path: Path, name: str) -> None:
    model, prompt = tiny_model(name), _prompt()
    caches = make_prompt_cache(model)
    model(mx.array(prompt)[None], cache=caches)
    mx.eval([cache.state for cache in caches])
    with SsdStore(tmp_path, CAP) as store:
        cache = PromptCache(RAM, cold=store)
        cache.put(prompt, caches)
        assert cache.flush(SECONDS) == (0, 0)
    expected = _greedy(model, caches)
    run = subprocess.run(
        [sys.executable, "-c", CONTINUE, str(tmp_path), name],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.stdout.strip() == str(expected), run.stderr


def continued(name: str, store: SsdStore) -> list[int]:
    """What a tiny model says after the prompt, with its KV from a store alone."""
    cache = PromptCache(RAM, cold=store)
    lease = cache.take([*_prompt(), 5])
    assert lease is not None
    assert lease.cold_tokens == len(_prompt())
    return _greedy(tiny_model(name), materialise(lease.caches))


def _prompt() -> list[int]:
    return [int(token) for token in np.random.default_rng(5).integers(0, 128, 30)]


def _greedy(model: Any, caches: list[Any]) -> list[int]:
    said, token = [], 5
    for _ in range(12):
        logits = model(mx.array([[token]]), cache=caches)
        token = int(np.argmax(np.array(logits[0, -1])))
        said.append(token)
    return said


def _fill(caches: list[Any], count: int, dtype: mx.Dtype) -> None:
    for cache in caches:
        if isinstance(cache, CacheList):
            _fill(list(cache.caches), count, dtype)
        elif isinstance(cache, ArraysCache):
            for slot in range(len(cache.cache) - 1 or 1):
                cache[slot] = mx.random.normal((1, 3, 5)).astype(dtype)
        else:
            if isinstance(cache, ChunkedKVCache):
                cache.maybe_trim_front()
            planes = (mx.random.normal((1, HEADS, count, DIM)).astype(dtype) for _ in range(2))
            cache.update_and_fetch(*planes)
