"""Restores in threads of their own, while the cache's thread decodes and the writer writes."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_swarm.broker.cache.kinds import materialise
from mlx_swarm.broker.cache.prompt_cache import PromptCache
from mlx_swarm.broker.cache.ssd import SsdStore
from tests.cache.helpers import TOKEN_BYTES, holds, put, sequence
from tests.cache.rows import advance
from tests.cache.ssd.folders import CAP, RAM, SECONDS, store_all


@pytest.mark.parametrize("family", ["full", "window", "state", "quantized"])
def test_what_any_thread_restored_is_decoded_on_by_the_caches_own(
    tmp_path: Path, family: str
) -> None:
    store_all(tmp_path, [sequence(start, 30) for start in range(8)], family)
    with SsdStore(tmp_path, CAP) as store:
        cache = PromptCache(RAM, cold=store)
        prompts = [[*sequence(start, 30), 7] for start in range(8)]
        restorations = [cache.restoration(prompt) for prompt in prompts]
        threads = [threading.Thread(target=each.run) for each in restorations if each is not None]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for prompt, restoration in zip(prompts, restorations, strict=True):
            lease = cache.lease(prompt, "", restoration)
            assert lease is not None
            assert lease.cold_tokens == 30
            # A lazy array of another thread could not be evaluated here.
            advance(lease.caches, [*prompt, 8, 9], 30)
            mx.eval([each.state for each in materialise(lease.caches)])
            lease.release()
        cache.check_integrity()


def test_files_may_be_restored_written_and_evicted_at_once(tmp_path: Path) -> None:
    pick = random.Random(3)
    with SsdStore(tmp_path, 30_000) as store, ThreadPoolExecutor(4) as threads:
        cache = PromptCache(60 * TOKEN_BYTES, cold=store)
        served = 0
        for _ in range(60):
            put(cache, sequence(pick.randrange(12), pick.randint(10, 30)))
            prompts = [[*sequence(pick.randrange(12), 30), 7] for _ in range(4)]
            reading = [cache.restoration(prompt) for prompt in prompts]
            running = [threads.submit(each.run) for each in reading if each is not None]
            put(cache, sequence(pick.randrange(12), pick.randint(10, 30)))
            cache.demote_idle(0)
            for each in running:
                each.result()
            for prompt, restoration in zip(prompts, reading, strict=True):
                lease = cache.lease(prompt, "", restoration)
                if lease is not None:
                    assert holds(lease, prompt[: lease.length], "full")
                    served += lease.cold_tokens
                    lease.release()
            cache.check_integrity()
        store.flush(SECONDS)
        store.check_integrity()
        counts = store.statistics()
        assert served
        assert counts.evicted
        assert counts.bytes <= 30_000
        assert counts.quarantined == 0
