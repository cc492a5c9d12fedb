"""The seam: accuracy of merged attention, its installation, and real models that run on clones."""

import hashlib
import importlib
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from mlx_swarm.broker.cache import kinds
from mlx_swarm.broker.cache.extents import Extent
from mlx_swarm.broker.cache.segments import KVHandle, Segment
from mlx_swarm.broker.engine import attention
from mlx_swarm.broker.engine.attention import STOCK, attend, merge_partials, partial_attention
from mlx_swarm.broker.engine.partials import weights_of
from mlx_swarm.broker.engine.self_test import SelfTest, self_test
from tests.engine.tiny_models import CONFIGS, VOCABULARY, tiny_model

Array = np.ndarray[Any, np.dtype[np.float64]]
DIM = 64
CUTS = {"two": (700, 333), "ragged": (1, 500, 7, 64, 3), "deep": (40,) * 12}
ON_CLONES = sorted(set(CONFIGS) - {"deepseek_v3"})


@pytest.fixture(autouse=True, scope="module")
def _uncompiled() -> Iterator[None]:
    """MLX compiles fused kernels with the system's compiler on a CPU: seconds for each model."""
    was_installed = attention.installed()
    mx.disable_compile()
    yield
    mx.enable_compile()
    (attention.install if was_installed else attention.uninstall)()


@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("deviation", [1, 4, 8, 16])
def test_worst_row_is_at_most_twice_as_far_off_as_stock_attention(
    deviation: int, dtype: mx.Dtype, cut: str, heads: tuple[int, int]
) -> None:
    """Against float64, at logits of that standard deviation, with sinks and without."""
    queries, keys, values = _inputs(sum(CUTS[cut]), heads, deviation, dtype)
    handle = _handle(keys, values, CUTS[cut])
    for sinks in (None, mx.random.normal((heads[0],)).astype(dtype)):
        exact = _exact(queries, keys, values, sinks)
        stock = STOCK(queries, keys, values, cache=None, scale=1.0, mask=None, sinks=sinks)
        ours = attend(queries, handle, 1.0, None, sinks)
        assert ours.dtype == dtype
        # A log-sum-exp of 30 is rounded by 2e-6, and with it the weight of its part.
        floor = 1e-5 if dtype == mx.float32 else 0.0
        assert _worst(ours, exact) <= max(2 * _worst(stock, exact), floor)


def test_partials_merge_in_any_order_and_depth() -> None:
    queries, keys, values = _inputs(90, (8, 2), 4, mx.float32)
    parts = [
        partial_attention(queries, keys[:, :, a:b], values[:, :, a:b], 1.0)
        for a, b in ((0, 20), (20, 21), (21, 90))
    ]
    assert [lse.dtype for _, lse in parts] == [mx.float32] * 3
    whole, lse = partial_attention(queries, keys, values, 1.0)
    for order in (parts, parts[::-1]):
        assert mx.allclose(merge_partials(order), whole, rtol=1e-5, atol=1e-5)
    nested = (
        merge_partials(parts[:2]),
        mx.logsumexp(mx.concatenate([parts[0][1], parts[1][1]], -1), -1, keepdims=True),
    )
    assert mx.allclose(merge_partials([nested, parts[2]]), whole, rtol=1e-5, atol=1e-5)
    assert lse.shape == (1, 8, 1, 1)


def test_several_rows_share_one_piece() -> None:
    """Queries of many rows over one set of keys: what groups of rows will be computed with."""
    queries = mx.random.normal((5, 8, 3, DIM))
    keys, values = mx.random.normal((1, 2, 30, DIM)), mx.random.normal((1, 2, 30, DIM))
    out, _ = partial_attention(queries, keys, values, 0.1)
    for row in range(5):
        alone = STOCK(queries[row : row + 1], keys, values, cache=None, scale=0.1, mask=None)
        assert mx.allclose(out[row : row + 1], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("mask", ["none", "causal", "1d", "2d", "4d", "per head", "scores", "one"])
def test_masks_of_every_shape_do_what_stock_attention_does_with_them(
    mask: str, length: int
) -> None:
    tokens = 60
    queries, keys, values = _inputs(tokens, (8, 2), 2, mx.float32, length)
    seen = mx.random.uniform(shape=(1, 8, length, tokens)) > 0.4
    seen[..., 0] = True
    given: Any = {
        "none": None,
        "causal": "causal",
        "1d": seen[0, 0, 0],
        "2d": seen[0, 0],
        "4d": seen[:, :1],
        "per head": seen,
        "scores": mx.random.normal((1, 8, length, tokens)),
        "one": mx.ones((1, 1, length, 1), mx.bool_),
    }[mask]
    stock = STOCK(queries, keys, values, cache=None, scale=1.0, mask=given)
    ours = attend(queries, _handle(keys, values, (20, 30, 10)), 1.0, given)
    assert mx.allclose(ours, stock, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hidden", [-mx.inf, mx.finfo(mx.float32).min, False])
def test_a_piece_that_nobody_sees_adds_nothing(hidden: Any) -> None:
    queries, keys, values = _inputs(60, (8, 2), 2, mx.float32)
    is_bool = hidden is False
    mask = mx.full((60,), True) if is_bool else mx.zeros((60,))
    mask[20:50] = hidden
    ours = attend(queries, _handle(keys, values, (20, 30, 10)), 1.0, mask)
    kept = [mx.concatenate([plane[:, :, :20], plane[:, :, 50:]], 2) for plane in (keys, values)]
    assert mx.allclose(ours, STOCK(queries, *kept, cache=None, scale=1.0, mask=None), atol=1e-5)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("length", [1, 4])
def test_quantised_clones_compute_exactly_what_the_stock_cache_does(bits: int, length: int) -> None:
    mx.random.seed(4)
    stock = QuantizedKVCache(32, bits)
    stock.update_and_fetch(*(mx.random.normal((1, 2, 50, DIM)) for _ in range(2)))
    layout = kinds.layout_of([stock])
    [clone] = kinds.clone(layout, [kinds.seal([stock], layout, 0, 50).whole()], None, 50)
    queries = mx.random.normal((1, 4, length, DIM))
    new = [mx.random.normal((1, 2, length, DIM)) for _ in range(2)]
    mask = stock.make_mask(length, return_array=False, window_size=None)
    assert clone.make_mask(length) == mask
    keys, values = stock.update_and_fetch(*new)
    expected = STOCK(mx.array(queries), keys, values, cache=stock, scale=0.1, mask=mask)
    handle, _ = clone.update_and_fetch(*new)
    assert mx.array_equal(attend(queries, handle, 0.1, mask), expected)


def test_the_seam_goes_in_once_and_comes_out_whole() -> None:
    module = importlib.import_module("mlx_lm.models.llama")
    attention.uninstall()
    assert module.scaled_dot_product_attention is STOCK
    assert not attention.installed()
    assert attention.install() >= 2
    assert attention.install() == 0
    assert attention.installed()
    assert module.scaled_dot_product_attention is attention.dispatch
    assert base.scaled_dot_product_attention is attention.dispatch
    assert attention.uninstall() >= 2
    assert module.scaled_dot_product_attention is STOCK


def test_the_seam_reaches_a_model_defined_elsewhere() -> None:
    """A model file of its own, loaded before the seam, holding the function under another name."""
    module = types.ModuleType("a_model_of_my_own")
    vars(module).update(nn=nn, sdpa=STOCK)
    sys.modules[module.__name__] = module
    exec("class Block(nn.Module):\n    pass\n", vars(module))
    try:
        model = nn.Sequential(module.Block())
        attention.install()
        assert module.sdpa is STOCK
        attention.install(model)
        assert module.sdpa is attention.dispatch
        attention.uninstall(model)
        assert module.sdpa is STOCK
    finally:
        del sys.modules[module.__name__]


def test_the_dispatcher_leaves_stock_caches_alone() -> None:
    model = tiny_model("llama")
    attention.uninstall()
    expected = model(mx.array([[1, 2, 3]]), cache=make_prompt_cache(model))
    attention.install(model)
    assert mx.array_equal(model(mx.array([[1, 2, 3]]), cache=make_prompt_cache(model)), expected)


@pytest.mark.parametrize("architecture", ON_CLONES)
def test_clones_continue_with_the_same_tokens_as_stock_caches(architecture: str) -> None:
    """Greedy, several suffixes on one donor, in chunks and token by token; it stays as it was."""
    model = tiny_model(architecture)
    assert self_test(model).passed
    prompt = _tokens(29)
    donor = make_prompt_cache(model)
    _forward(model, prompt, donor)
    layout = kinds.layout_of(donor)
    extent, checkpoint = kinds.seal(donor, layout, 0, 29), kinds.snapshot(donor, layout)
    span, before = extent.whole(), _checksums(extent)
    for seed, suffix in enumerate((1, 3, 11)):
        tokens = _tokens(suffix, seed + 1)
        stock = make_prompt_cache(model)
        _forward(model, prompt, stock)
        clones = kinds.clone(layout, [span], checkpoint, 29)
        assert _greedy(model, tokens, clones) == _greedy(model, tokens, stock)
    assert _checksums(extent) == before


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_oss", "gemma3n"])
def test_a_prefix_in_many_pieces_gives_the_same_tokens(architecture: str) -> None:
    """A chain of nodes, a clone of a clone, and a cut in the middle of an extent."""
    model = tiny_model(architecture)
    attention.install(model)
    prompt, suffix = _tokens(30), _tokens(4, 9)
    caches = make_prompt_cache(model)
    path = []
    for start, stop in ((0, 9), (9, 10), (10, 18)):
        _forward(model, prompt[start:stop], caches)
        layout = kinds.layout_of(caches)
        path.append(kinds.seal(caches, layout, start, stop).whole())
    clones = kinds.clone(layout, path, None, 18)
    _forward(model, prompt[18:30], clones)
    path.append(kinds.seal(clones, layout, 18, 30).whole())
    stock = make_prompt_cache(model)
    _forward(model, prompt[:26], stock)
    assert layout.valid_length(path, (), 26) == (26, None)
    again = kinds.clone(layout, path, None, 26)
    assert _greedy(model, suffix, again) == _greedy(model, suffix, stock)


@pytest.mark.parametrize("architecture", ["deepseek_v3", "falcon_h1", "gpt_oss", "llama4"])
def test_materialised_clones_serve_any_model(architecture: str) -> None:
    """Multi-head latent attention computes on its keys: it gets stock caches, and says so."""
    model = tiny_model(architecture)
    verdict = self_test(model)
    assert verdict.passed == (architecture != "deepseek_v3")
    donor = make_prompt_cache(model)
    _forward(model, _tokens(20), donor)
    layout = kinds.layout_of(donor)
    span, checkpoint = kinds.seal(donor, layout, 0, 20).whole(), kinds.snapshot(donor, layout)
    clones = kinds.clone(layout, [span], checkpoint, 20)
    failed = SelfTest(False, "as if it had failed")
    stock = (verdict if not verdict.passed else failed).usable(clones)
    assert [type(cache) for cache in stock] == [type(cache) for cache in donor]
    assert _greedy(model, _tokens(3, 5), stock) == _greedy(model, _tokens(3, 5), donor)


def test_a_model_that_bypasses_the_seam_fails_the_self_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = importlib.import_module("mlx_lm.models.llama")
    model = tiny_model("llama")

    def direct(q: Any, k: Any, v: Any, cache: Any, scale: float, mask: Any) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)

    monkeypatch.setattr(module, attention.NAME, direct)
    verdict = self_test(model)
    assert not verdict.passed
    assert "TypeError" in verdict.reason


def test_a_model_that_reads_only_the_tail_fails_the_self_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wrong without an error: only the logits show it."""
    module = importlib.import_module("mlx_lm.models.llama")
    model = tiny_model("llama")

    def forgetful(q: Any, k: Any, v: Any, **rest: Any) -> mx.array:
        if isinstance(k, KVHandle):
            k = KVHandle(k.segments[-1:])
        return attention.dispatch(q, k, v if isinstance(v, mx.array) else k, **rest)

    monkeypatch.setattr(module, attention.NAME, forgetful)
    verdict = self_test(model)
    assert not verdict.passed
    assert "logits differ by" in verdict.reason
    assert verdict.error > 3 * verdict.tolerance


def test_a_model_with_computed_values_is_told_so() -> None:
    attention.install()
    keys = KVHandle((Segment.over(0, 4, [mx.zeros((1, 2, 4, DIM))] * 2),))
    with pytest.raises(TypeError, match="stock caches"):
        base.scaled_dot_product_attention(
            mx.zeros((1, 4, 1, DIM)), keys, mx.zeros((1, 2, 4, DIM)), None, scale=1.0, mask=None
        )


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "falcon_h1"])
def test_models_in_16_bits_pass_the_self_test(architecture: str, dtype: mx.Dtype) -> None:
    verdict = self_test(tiny_model(architecture, dtype))
    assert verdict.passed, verdict


def test_caches_of_an_unknown_kind_fail_the_self_test_by_name() -> None:
    model = tiny_model("llama")
    model.make_cache = lambda: [type("Fancy", (KVCache,), {})() for _ in range(4)]
    verdict = self_test(model)
    assert not verdict.passed
    assert "Fancy" in verdict.reason


def _inputs(
    tokens: int, heads: tuple[int, int], deviation: int, dtype: mx.Dtype, length: int = 1
) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values whose logits at scale 1 have that standard deviation."""
    mx.random.seed(tokens + deviation)
    queries = mx.random.normal((1, heads[0], length, DIM)) * (deviation / DIM**0.5)
    keys = mx.random.normal((1, heads[1], tokens, DIM))
    values = mx.random.normal((1, heads[1], tokens, DIM))
    return queries.astype(dtype), keys.astype(dtype), values.astype(dtype)


def _handle(keys: mx.array, values: mx.array, cut: Sequence[int]) -> KVHandle:
    segments, start = [], 0
    for count in cut:
        segments.append(Segment.over(start, start + count, (keys, values), start))
        start += count
    assert start == keys.shape[2]
    return KVHandle(tuple(segments))


def _exact(queries: mx.array, keys: mx.array, values: mx.array, sinks: mx.array | None) -> Array:
    group = queries.shape[1] // keys.shape[1]
    q, k, v = (np.array(a.astype(mx.float32)).astype(np.float64) for a in (queries, keys, values))
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    logits = q @ k.swapaxes(-1, -2)
    if sinks is not None:
        sink = np.array(sinks.astype(mx.float32)).astype(np.float64)
        logits = np.concatenate([logits, sink[None, :, None, None]], -1)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out: Array = weights[..., : k.shape[2]] @ v
    return out


def _worst(out: mx.array, exact: Array) -> float:
    """The largest error of a row relative to the row's size."""
    error = np.array(out.astype(mx.float32)).astype(np.float64) - exact
    return float((np.linalg.norm(error, axis=-1) / np.linalg.norm(exact, axis=-1)).max())


def _tokens(count: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, VOCABULARY, count)]


def _forward(model: Any, tokens: Sequence[int], caches: list[Any]) -> mx.array:
    logits: mx.array = model(mx.array([tokens]), cache=caches)[0, -1]
    mx.eval(logits, [cache.state for cache in caches])
    return logits


def _greedy(model: Any, tokens: Sequence[int], caches: list[Any], count: int = 8) -> list[int]:
    made: list[int] = []
    for _ in range(count):
        made.append(int(np.array(_forward(model, tokens, caches)).argmax()))
        tokens = made[-1:]
    return made


def _checksums(extent: Extent) -> list[str]:
    return [hashlib.sha256(np.array(b).tobytes()).hexdigest() for b in extent.buffers]


def test_what_one_thread_built_and_never_computed_does_not_fail_in_the_next() -> None:
    """The last layer's attention of a prompt is such: nothing but its KV is computed."""
    count = 1_237  # nobody else's
    sums: list[float] = []
    mx.eval(mx.zeros(1) + 1)  # MLX's first stream is for all threads

    def build(compute: bool) -> None:
        logits = mx.zeros((1, count))
        _, total = weights_of(logits, mx.zeros((1, 1)))
        if compute:
            sums.append(total.item())  # type: ignore[arg-type]

    for compute in (False, True):
        thread = threading.Thread(target=build, args=(compute,))
        thread.start()
        thread.join()
    assert sums == [count]
