"""What all parts of `bench.swarm` start from: the model, random prompts, rates, settled memory."""

import gc
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from bench.runner import machine
from bench.swarm_findings import Found
from bench.swarm_records import Record, today
from mlx_swarm.broker.cache.layout import Layout, TokenLeaf
from mlx_swarm.broker.engine.batch_test import batch_test
from mlx_swarm.broker.engine.self_test import self_test
from mlx_swarm.broker.engine.shared_attention import Geometry
from mlx_swarm.broker.errors import InvalidSetting
from mlx_swarm.broker.models import LoadedModel, load

PREFILL_CHUNK = 2048
"""Where mlx-lm cuts a prompt, and about where a model prefills fastest."""

Tokens = list[int]


class Setup(NamedTuple):
    """A model that decodes with shared prefixes. `attention` is what serves its layers, and why.

    The broker's cache has `ram`; copies of the prefix in every row may take `copies` bytes.
    """

    loaded: LoadedModel
    layout: Layout
    attention: str
    ram: str
    copies: int

    @property
    def geometry(self) -> Geometry:
        """The shapes of its first layer's attention."""
        plane = next(x for x in self.layout.leaves if isinstance(x, TokenLeaf)).planes[0]
        heads = int(self.loaded.config["num_attention_heads"])
        return Geometry(heads, plane.heads, plane.dim, plane.dtype)

    def kv_bytes(self, tokens: int) -> int:
        """Exact bytes of the KV of so many tokens."""
        return tokens * self.layout.bytes_per_token

    def record(self, found: Found) -> Record:
        """A finding with its conditions."""
        return Record(
            date=today(),
            machine=machine(),
            model=self.loaded.name,
            dtype=self.loaded.dtype,
            attention=self.attention,
            found=found,
        )


class Supply:
    """Random tokens of a vocabulary, never the same twice; its ends, the special ones, are left
    out. Two of one seed give the same.
    """

    def __init__(self, vocabulary: int, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self._low, self._high = vocabulary // 10, vocabulary * 9 // 10

    def take(self, count: int) -> Tokens:
        """The next tokens."""
        tokens: Tokens = self.random.integers(self._low, self._high, count).tolist()
        return tokens

    def prompts(self, agents: int, shared: int, own: int) -> list[Tokens]:
        """Prompts with a new prefix in common."""
        prefix = self.take(shared)
        return [[*prefix, *self.take(own)] for _ in range(agents)]


def prepare(model: str, dtype: str | None, *, ram: str, copies: int) -> Setup:
    """Load a model and try it, as the engine does. It never ends a text before it is asked to.

    Raises `InvalidSetting` for a model whose rows cannot share prefixes, or not all of them.
    """
    loaded = load(model, dtype=dtype)
    # All systems are to generate the same number of tokens.
    loaded.tokenizer.eos_token_ids = ()
    self_test(loaded.model)
    verdict = batch_test(loaded.model, loaded.make_caches)
    if verdict.layout is None:
        raise InvalidSetting(f"{model} does not decode with shared prefixes: {verdict.test.reason}")
    kinds = [
        leaf.kind if isinstance(leaf, TokenLeaf) else "state" for leaf in verdict.layout.leaves
    ]
    if set(kinds) != {"KVCache"}:
        raise InvalidSetting(
            f"{model} has {kinds.count('KVCache')} of {len(kinds)} layers with a KVCache; stock "
            "steps are measured where all have one"
        )
    served = [
        f"{each.name} ({each.reason})" if each.reason else each.name for each in verdict.attention
    ]
    return Setup(loaded, verdict.layout, ", ".join(served), ram, copies)


def supply(setup: Setup, seed: int) -> Supply:
    """Random prompts for a model."""
    return Supply(int(setup.loaded.config["vocab_size"]), seed)


def prefill_rate(setup: Setup, tokens: Sequence[int], repeats: int = 3) -> float:
    """Tokens a second of the stock model on mlx-lm's caches, chunk by chunk, after a warm-up."""
    seconds = []
    for _ in range(repeats + 1):
        caches = setup.loaded.make_caches()
        mx.synchronize()
        start = time.perf_counter()
        for at in range(0, len(tokens), PREFILL_CHUNK):
            chunk = mx.array([tokens[at : at + PREFILL_CHUNK]])
            setup.loaded.model(chunk, cache=caches)
            mx.eval([cache.state for cache in caches])
        mx.synchronize()
        seconds.append(time.perf_counter() - start)
    return len(tokens) / statistics.median(seconds[1:])


def distinct_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """The nodes of all prompts in one tree: what has to be computed at least."""
    total, before = 0, Tokens()
    for prompt in sorted(map(list, prompts)):
        pairs = enumerate(zip(before, prompt, strict=False))
        common = next((at for at, (a, b) in pairs if a != b), min(len(before), len(prompt)))
        total += len(prompt) - common
        before = prompt
    return total


def settle() -> int:
    """Give back what nobody needs, and begin a new peak; the bytes that are in use."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    return mx.get_active_memory()
