"""Seeded models of every family run, repeat, and take every parameter; bad specs are one line."""

from collections.abc import Iterator

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten

from mlx_swarm.broker.errors import ModelError, ModelNotFound, ModelUnreadable
from mlx_swarm.broker.models import LoadedModel, load
from mlx_swarm.broker.models.synthetic_config import FAMILIES


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Compiling the kernels of a dozen architectures takes longer than running them."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def weights(model: LoadedModel) -> dict[str, mx.array]:
    return dict(tree_flatten(model.model.parameters()))


def logits(model: LoadedModel, text: str = "some text") -> mx.array:
    result: mx.array = model.model(mx.array([model.encode(text)]))
    return result


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("architecture", [*FAMILIES, "llama?window=8", "olmo2"])
def test_a_model_of_each_family_runs(architecture: str) -> None:
    model = load(f"synthetic:{architecture}")
    prompt = model.encode("a prompt longer than a small window")
    result = model.model(mx.array([prompt]), cache=model.make_caches())
    assert result.shape == (1, len(prompt), len(model.tokenizer))
    assert mx.isfinite(result).all()
    assert result.std() > 0.01
    assert isinstance(mlx_lm.generate(model.model, model.tokenizer, prompt, max_tokens=3), str)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("architecture", ["llama", "gpt_oss", "falcon_h1", "qwen3_next"])
def test_the_seed_decides_every_weight(architecture: str) -> None:
    first, again, other = (
        weights(load(f"synthetic:{architecture}?seed={seed}&layers=2")) for seed in (1, 1, 2)
    )
    assert all(mx.array_equal(first[name], again[name]) for name in first)
    changed = {name for name in first if not mx.array_equal(first[name], other[name])}
    assert {name for name in first if first[name].ndim > 1} <= changed


def test_what_others_draw_after_a_load_is_not_decided_by_its_seed() -> None:
    drawn = []
    for state in (1, 2, 1):
        mx.random.seed(state)
        load("synthetic:llama?layers=1&hidden=16&heads=1&seed=5")
        drawn.append(mx.random.uniform().item())
    assert drawn[0] == drawn[2] != drawn[1]


def test_gpt_oss_has_sinks_that_matter() -> None:
    found = weights(load("synthetic:gpt_oss"))
    assert any(name.endswith("sinks") and mx.abs(found[name]).max() > 0.01 for name in found)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_any_dtype(dtype: str) -> None:
    model = load(f"synthetic:llama?dtype={dtype}&layers=1")
    assert model.dtype == dtype
    assert {str(value.dtype) for value in weights(model).values()} == {f"mlx.core.{dtype}"}
    assert load("synthetic:llama?dtype=float16&layers=1", dtype=dtype).dtype == dtype


def test_every_parameter_is_taken() -> None:
    model = load(
        "synthetic:llama?layers=3&hidden=96&heads=6&kv_heads=3&head_dim=32&intermediate=80"
        "&vocab=500&context=131072&seed=5&config.rope_theta=5e5"
    )
    found = weights(model)
    assert found["model.layers.2.self_attn.q_proj.weight"].shape == (6 * 32, 96)
    assert found["model.layers.2.self_attn.k_proj.weight"].shape == (3 * 32, 96)
    assert found["model.layers.2.mlp.up_proj.weight"].shape == (80, 96)
    assert found["model.embed_tokens.weight"].shape == (500, 96)
    assert model.context_length == 131072
    assert model.config["rope_theta"] == 5e5
    assert len(model.tokenizer) == 500
    assert model.tokenizer.decode([499]) == "<unused_499>"


def test_windows_are_real() -> None:
    model = load("synthetic:gemma3_text?window=8&layers=2")
    kinds = [type(cache).__name__ for cache in model.make_caches()]
    assert kinds == ["RotatingKVCache", "KVCache"]
    assert model.make_caches()[0].max_size == 8


def test_identities_tell_specs_apart() -> None:
    specs = ["llama", "llama?seed=1", "llama?layers=2", "llama?vocab=300", "qwen3"]
    digests = [load(f"synthetic:{spec}").identity.digest for spec in specs]
    assert len(set(digests)) == len(specs)
    assert load("synthetic:llama").identity.digest == digests[0]


def test_the_real_tokenizer_can_be_had() -> None:
    model = load("synthetic:llama?layers=1&hidden=16&heads=1&vocab=50000&tokenizer=smollm2-135m")
    assert logits(model).shape[-1] == len(model.tokenizer) == 50000
    assert model.encode("<|im_start|>user") == [1, 4093]


@pytest.mark.parametrize(
    ("spec", "kind", "said"),
    [
        ("", ModelNotFound, "names no architecture"),
        ("no/such", ModelNotFound, "names no architecture"),
        ("telepathy", ModelNotFound, "no architecture 'telepathy'"),
        ("base", ModelNotFound, "no architecture 'base'"),
        ("llama?depth=3", ModelUnreadable, "no parameter 'depth'"),
        ("llama?layers=0", ModelUnreadable, "layers is '0'"),
        ("llama?layers=many", ModelUnreadable, "layers is 'many'"),
        ("llama?layers=-1", ModelUnreadable, "layers is '-1'"),
        ("llama?layers=1000000", ModelUnreadable, "from 1 to 4096"),
        ("llama?layers=1&hidden=1000000", ModelUnreadable, r"need [\d,.]+ GiB; this machine has"),
        ("llama?layers=1&vocab=2000000000", ModelUnreadable, r"need [\d,.]+ GiB"),
        ("llama?layers=", ModelUnreadable, "layers is ''"),
        ("llama?layers=1&layers=2", ModelUnreadable, "given twice"),
        ("llama?heads=4&kv_heads=3", ModelUnreadable, "do not fit together"),
        ("llama?hidden=3", ModelUnreadable, "do not fit together"),
        ("llama?vocab=10", ModelUnreadable, "too small"),
        ("llama?dtype=int4", ModelUnreadable, "'int4'"),
        ("llama?tokenizer=gpt5", ModelNotFound, "no tokenizer 'gpt5'"),
        ("llama?config.colour=1", ModelUnreadable, r"llama has no config\.colour"),
        ("qwen3?window=4", ModelUnreadable, "qwen3 has no window"),
        ("minicpm3", ModelUnreadable, "minicpm3 cannot be made"),
    ],
)
def test_bad_specs_are_one_line(spec: str, kind: type[ModelError], said: str) -> None:
    with pytest.raises(kind, match=said) as error:
        load(f"synthetic:{spec}")
    assert "\n" not in str(error.value)
