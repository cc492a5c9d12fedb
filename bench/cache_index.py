"""The index of the prompt cache measured: look-ups, its bytes, searches that diverge, eviction.

`python -m bench.cache` prints these; each function returns comparisons for the runner's report.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from mlx_lm.models.cache import LRUPromptCache

from bench.block_replay import Replay, Request, clairvoyant_hit_rate, working_set
from bench.cache_workloads import (
    bursts,
    conversations,
    documents,
    phases,
    read_blocks,
    round_table,
    swarm,
    tree_search,
)
from bench.runner import Comparison, compare
from mlx_swarm.broker.cache.eviction import LRU, EvictionPolicy, HitDensity
from mlx_swarm.broker.cache.prefix_hash import Tokens, as_tokens, page_hashes
from mlx_swarm.broker.cache.tree import PrefixTree

ENTRY_COUNTS = (10, 100, 1_000, 10_000, 100_000)
TRACE_CAPACITIES = (1_000, 3_000, 10_000, 50_000)
ENTRY_TOKENS = 3_000
PROMPT_TOKENS = 32_768
VOCABULARY = 150_000


class LookupTimes(NamedTuple):
    """Seconds that a look-up took, conversion from a list included, and the index's size."""

    entries: int
    median: float
    p99: float
    worst: float
    index_bytes: int
    tokens: int


class HitRates(NamedTuple):
    """Hit rates of one workload at one capacity (blocks); `hinted` where the workload has hints."""

    workload: str
    capacity: int
    lru: float
    default: float
    clairvoyant: float
    hinted: float | None = None

    @property
    def over_lru(self) -> float:
        """The default policy's hit rate over LRU's."""
        return self.default / self.lru if self.lru else float("inf" if self.default else 1)

    @property
    def of_optimum(self) -> float | None:
        """The hit rate with hints over the clairvoyant's."""
        return self.hinted / self.clairvoyant if self.hinted is not None else None


def lookup_times(
    counts: Sequence[int] = ENTRY_COUNTS,
    lookups: int = 400,
    seed: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[LookupTimes]:
    """Look up prompts of 32k tokens, given as lists, among more and more entries of 3k tokens.

    Entries share one of 100 instructions of 1k tokens, and differ after. Half of the prompts follow
    a stored path of 32k tokens in 64 nodes to its end, half leave an entry after its 3k tokens. On
    a busy machine, `time.thread_time` as the clock leaves out what other processes take.
    """
    generator = np.random.default_rng(seed)
    tree, entries = PrefixTree(), _entries(generator)
    long = generator.integers(0, VOCABULARY, PROMPT_TOKENS, np.uint32)
    for stop in range(512, PROMPT_TOKENS + 1, 512):
        tree.insert(long[:stop])
    some: list[Tokens] = []
    for count in counts:
        while len(some) < count:
            some.append(next(entries))
            tree.insert(some[-1])
        prompts = [_prompt(generator, long if at % 2 else some[at % count]) for at in range(16)]
        taken = sorted(_seconds(tree.walk, prompts[at % 16], clock) for at in range(lookups))
        size = tree.statistics()
        yield LookupTimes(
            entries=count,
            median=statistics.median(taken),
            p99=taken[int(lookups * 0.99)],
            worst=taken[-1],
            index_bytes=size.index_bytes,
            tokens=size.tokens,
        )


def page_jump(entries: int = 1_000, repeats: int = 20, seed: int = 2) -> Comparison:
    """The token-exact walk beside what a jump by page hashes needs before its first comparison."""
    generator = np.random.default_rng(seed)
    tree, made = PrefixTree(), _entries(generator)
    for _ in range(entries):
        tree.insert(next(made))
    long = generator.integers(0, VOCABULARY, PROMPT_TOKENS, np.uint32)
    for stop in range(512, PROMPT_TOKENS + 1, 512):
        tree.insert(long[:stop])
    return compare(
        f"find a prefix of {PROMPT_TOKENS:,} tokens in 64 nodes",
        {
            "walk, every token compared": lambda: _many(tree.walk, long),
            "xxh3_128 of its pages alone": lambda: _many(_hash_pages, long),
        },
        repeats=repeats,
    )


def diverging_search(tokens: int = 131_072, repeats: int = 3, seed: int = 3) -> Comparison:
    """Prompts that leave a 128k-token entry at its middle: this index and mlx-lm's cache."""
    chance = random.Random(seed)
    entry = [chance.randrange(VOCABULARY) for _ in range(tokens)]
    prompt = [*entry[: tokens // 2], VOCABULARY, *entry[tokens // 2 + 1 :]]
    tree, theirs = PrefixTree(), LRUPromptCache()
    tree.insert(entry)
    theirs.insert_cache("model", entry, [])
    assert tree.walk(prompt).length == tokens // 2

    def search_theirs() -> float:
        return _seconds(lambda given: theirs.fetch_nearest_cache("model", given), prompt)

    return compare(
        f"diverging search of an entry of {tokens:,} tokens",
        {
            "mlx-swarm, from a list": lambda: _seconds(tree.walk, prompt),
            "mlx-lm LRUPromptCache": search_theirs,
        },
        repeats=repeats,
    )


def trace_hit_rates(
    trace: Path, capacities: Sequence[int] = TRACE_CAPACITIES
) -> Iterator[HitRates]:
    """Eviction on a block trace. Raises `FileNotFoundError` with one line if it is not there."""
    if not trace.is_file():
        raise FileNotFoundError(f"no trace at {trace}: eviction on the trace is not measured")
    requests = read_blocks(trace)
    for capacity in capacities:
        yield hit_rates(trace.stem, requests, capacity)


def workload_hit_rates(seed: int = 11, shares: Sequence[float] = (0.1, 0.3)) -> Iterator[HitRates]:
    """Eviction on generated workloads, at capacities that are shares of what each uses in all."""
    for name, requests in _workloads(seed):
        for share in shares:
            yield hit_rates(name, requests, int(working_set(requests) * share))


def hit_rates(name: str, requests: Sequence[Request], capacity: int) -> HitRates:
    """LRU, the default policy, the optimum, and the default with hints where there are any."""

    def replay(policy: EvictionPolicy, hinted: bool = False) -> float:
        return Replay(capacity, policy, hinted).hit_rate(requests)

    has_hints = any(request.wait is not None for request in requests)
    return HitRates(
        workload=name,
        capacity=capacity,
        lru=replay(LRU()),
        default=replay(HitDensity()),
        clairvoyant=clairvoyant_hit_rate(requests, capacity),
        hinted=replay(HitDensity(), hinted=True) if has_hints else None,
    )


def _workloads(seed: int) -> Iterator[tuple[str, list[Request]]]:
    yield "swarm, tool calls", swarm(seed, agents=64, turns=8, tool_seconds=20, waves=4)
    yield "round table", round_table(seed, agents=60, rounds=12)
    yield "tree search", tree_search(seed, searches=150, width=5, depth=8)
    yield "conversations", conversations(seed, rate=0.5, think_seconds=60, count=1500)
    moving = documents(seed, count=2000, skew=1.0, moves_every=3000, total=9000)
    yield "documents, popularity moves", moving
    yield "phases", phases(seed, documents=60, uses=20, total=6000)
    yield "bursts", bursts(seed, most=6, gap_seconds=40, count=2500)


def _entries(generator: np.random.Generator) -> Iterator[Tokens]:
    instructions = generator.integers(0, VOCABULARY, (100, 1_000), np.uint32)
    while True:
        tail = generator.integers(0, VOCABULARY, ENTRY_TOKENS - 1_000, np.uint32)
        yield np.concatenate([instructions[generator.integers(100)], tail])


def _prompt(generator: np.random.Generator, stem: Tokens) -> list[int]:
    rest = generator.integers(0, VOCABULARY, PROMPT_TOKENS - len(stem), np.uint32)
    return [*stem.tolist(), *rest.tolist()]


def _seconds(
    function: Callable[[Any], object],
    given: Any,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    start = clock()
    function(given)
    return clock() - start


def _many(function: Callable[[Tokens], object], tokens: Tokens, times: int = 20) -> float:
    return statistics.median(_seconds(function, tokens) for _ in range(times))


def _hash_pages(tokens: Tokens) -> None:
    page_hashes(as_tokens(tokens), digest=xxhash.xxh3_128_digest)
