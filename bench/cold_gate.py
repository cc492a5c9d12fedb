"""Restoring against computing, by length, and what the cost gate would have chosen."""

import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from bench.cold_findings import GATE_BAR, Line
from bench.cold_store import flush, forget_pages, opened
from bench.swarm_findings import Bar
from bench.swarm_setup import PREFILL_CHUNK, Setup, Tokens, settle, supply
from mlx_swarm.broker.cache.prompt_cache import PromptCache
from mlx_swarm.broker.cache.restores import CostGate
from mlx_swarm.broker.cache.ssd.names import SUFFIX


class GateSizes(NamedTuple):
    """Prompt lengths; the gate learns its first rates from `learn` tokens."""

    lengths: tuple[int, ...]
    learn: int
    repeats: int = 3


def gate(setup: Setup, sizes: GateSizes, parent: Path) -> Iterator[Line]:
    """Each length is computed, stored, and read back with cold pages."""
    tokens, judge = supply(setup, 5), CostGate()
    # What is done for the first time compiles and takes longer.
    _measure(setup, tokens.take(sizes.learn), 1, parent)
    _learn(judge, sizes.learn, *_measure(setup, tokens.take(sizes.learn), 1, parent))
    for length in sizes.lengths:
        size, restored, computed = _measure(setup, tokens.take(length), sizes.repeats, parent)
        reads = judge.opens_for(size, length)
        chosen, better = (restored if reads else computed), min(restored, computed)
        yield Line(
            part="gate",
            setting=f"{setup.loaded.name[:40]}, {length:,} tokens",
            figures={
                "MB": size / 1e6,
                "restore s": restored,
                "prefill s": computed,
                "restore / prefill": restored / computed,
                "gate": "restore" if reads else "prefill",
                "chosen / better": chosen / better,
            },
            bars=(Bar(f"gate at {length:,} tokens over the better", chosen / better, GATE_BAR),),
        )
        _learn(judge, length, size, restored, computed)


def _learn(judge: CostGate, length: int, size: int, restored: float, computed: float) -> None:
    judge.note_restore(size, restored)
    judge.note_prefill(length, computed)


def _measure(setup: Setup, tokens: Tokens, repeats: int, parent: Path) -> tuple[int, float, float]:
    """Bytes of a sequence, and the median seconds to restore it and to compute it."""
    with opened(parent) as (_, cache):
        computed, caches = [], list[Any]()
        for _ in range(repeats):
            del caches
            settle()
            seconds, caches = _prefill(setup, tokens)
            computed.append(seconds)
        cache.put(tokens, caches)
        del caches
        flush(cache)
        runs = [_restore(cache, tokens, parent) for _ in range(repeats)]
        size = runs[0][0]
        return size, statistics.median(seconds for _, seconds in runs), statistics.median(computed)


def _restore(cache: PromptCache, tokens: Tokens, parent: Path) -> tuple[int, float]:
    """Bytes read and seconds until a lease on all tokens is there."""
    cache.clear()
    settle()
    forget_pages(list(parent.glob(f"*/*/*{SUFFIX}")))
    prompt = [*tokens, tokens[0]]
    start = time.perf_counter()
    restoration = cache.restoration(prompt)
    assert restoration is not None
    restoration.run()
    lease = cache.lease(prompt, "", restoration)
    seconds = time.perf_counter() - start
    assert lease is not None
    assert lease.cold_tokens == len(tokens), lease.cold_tokens
    lease.release()
    return restoration.match.bytes, seconds


def _prefill(setup: Setup, tokens: Sequence[int]) -> tuple[float, list[Any]]:
    caches = setup.loaded.make_caches()
    mx.synchronize()
    start = time.perf_counter()
    for at in range(0, len(tokens), PREFILL_CHUNK):
        setup.loaded.model(mx.array([tokens[at : at + PREFILL_CHUNK]]), cache=caches)
        mx.eval([cache.state for cache in caches])
    mx.synchronize()
    return time.perf_counter() - start, list(caches)
