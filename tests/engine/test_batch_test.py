"""Which models decode in our batch, and what is said of those that do not."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_swarm.broker.engine import attention
from mlx_swarm.broker.engine.batch_test import batch_test
from tests.engine.tiny_models import CONFIGS, tiny_model

REFUSED = {
    "llama4": "ChunkedKVCache is not batched",
    "deepseek_v3": "KVCache holds keys and values of different shapes",
}


@pytest.fixture(autouse=True, scope="module")
def _uncompiled() -> Iterator[None]:
    """MLX compiles fused kernels with the system's compiler on a CPU: seconds for each model."""
    was_installed = attention.installed()
    mx.disable_compile()
    yield
    mx.enable_compile()
    (attention.install if was_installed else attention.uninstall)()


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_model_passes_with_the_logits_of_stock_caches_or_is_refused_by_name(
    architecture: str,
) -> None:
    model = tiny_model(architecture)
    attention.install(model)
    verdict = batch_test(model, lambda: list(make_prompt_cache(model)))
    assert verdict.test.reason == REFUSED.get(architecture, "")
    assert verdict.test.passed == (verdict.layout is not None) == (architecture not in REFUSED)
    has_attention = architecture not in ("mamba2", *REFUSED)
    assert bool(verdict.attention) == has_attention


def test_a_model_that_looks_at_its_masks_is_refused() -> None:
    model = tiny_model("llama")
    attention.install(model)

    def own_mask(tokens: mx.array, cache: Any) -> mx.array:
        for each in cache:
            each.make_mask = lambda *_, **__: mx.zeros((1,))
        logits: mx.array = model(tokens, cache=cache)
        return logits

    verdict = batch_test(own_mask, lambda: list(make_prompt_cache(model)))
    assert not verdict.test.passed
    assert "masks" in verdict.test.reason


def test_quantised_caches_are_refused() -> None:
    model = tiny_model("llama")
    attention.install(model)
    verdict = batch_test(
        model, lambda: [each.to_quantized(group_size=32) for each in make_prompt_cache(model)]
    )
    assert not verdict.test.passed
    assert verdict.layout is None
