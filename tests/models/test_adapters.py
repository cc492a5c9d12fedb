"""Adapters: the outputs of mlx-lm's own loader, over base weights that are there once."""

import gc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import load_adapters

from mlx_swarm.broker import AdapterError
from mlx_swarm.broker.models import LoadedModel, adapter_bytes, load, load_adapter, namespace_digest
from mlx_swarm.broker.models.adapter_files import CONFIG, WEIGHTS
from mlx_swarm.broker.models.progress import Progress
from tests.models.tiny_adapter import edit_config, write_adapter

SIZES = "layers=2&hidden=64&heads=4&kv_heads=2&intermediate=64&context=256&seed=3"
LLAMA = f"synthetic:llama?{SIZES}"
TIED = f"{LLAMA}&config.tie_word_embeddings=true"
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


class Case(NamedTuple):
    """A model and what to adapt in it; `bits` of 0 leaves it as it is."""

    spec: str
    kind: str = "lora"
    keys: list[str] | None = None
    layers: int = -1
    bits: int = 0
    dtype: mx.Dtype = mx.float32


CASES = {
    "lora": Case(LLAMA),
    "lora of the last layer": Case(LLAMA, layers=1),
    "lora of two projections": Case(LLAMA, keys=["self_attn.q_proj", "self_attn.v_proj"]),
    "lora stored in bfloat16": Case(LLAMA, dtype=mx.bfloat16),
    "lora on a bfloat16 model": Case(f"{LLAMA}&dtype=bfloat16"),
    "dora": Case(LLAMA, kind="dora"),
    "tied embeddings": Case(TIED, keys=["self_attn.q_proj", "model.embed_tokens"]),
    "dora of tied embeddings": Case(TIED, kind="dora", keys=["model.embed_tokens"]),
    "the head": Case(LLAMA, keys=["lm_head", "mlp.up_proj"]),
    "quantised": Case(LLAMA, bits=4),
    "quantised to 8 bits, dora": Case(LLAMA, kind="dora", bits=8),
    "experts": Case(f"synthetic:qwen3_moe?{SIZES}"),
    "quantised experts": Case(f"synthetic:qwen3_moe?{SIZES}", bits=4),
    "windows with sinks": Case(f"synthetic:gpt_oss?{SIZES}&window=16"),
    "state": Case("synthetic:mamba2?layers=2&hidden=64&context=256&seed=3"),
    "state and attention": Case(f"synthetic:qwen3_next?{SIZES}"),
}


def loaded(case: Case) -> LoadedModel:
    model = load(case.spec)
    if case.bits:
        nn.quantize(model.model, group_size=32, bits=case.bits)
        mx.eval(model.model.parameters())
    return model


def written(folder: Path, model: LoadedModel, case: Case, seed: int = 0) -> Path:
    given = {"kind": case.kind, "keys": case.keys, "layers": case.layers, "dtype": case.dtype}
    return write_adapter(folder, model.model, seed=seed, **given)  # type: ignore[arg-type]


def logits(model: LoadedModel, tokens: list[int] = PROMPT) -> mx.array:
    found: mx.array = model.model(mx.array([tokens]), cache=model.make_caches())
    mx.eval(found)
    return found


def equal(some: mx.array, other: mx.array) -> bool:
    return some.dtype == other.dtype and bool(mx.array_equal(some, other).item())


def arrays(model: nn.Module) -> dict[str, Any]:
    return dict(tree_flatten(model.parameters()))


def look(model: nn.Module) -> dict[str, Any]:
    """All that could be changed in a tree of modules: what is where, by identity, and flags."""
    return {
        path: (
            id(module),
            module.training,
            set(module._no_grad),
            {name: id(value) for name, value in module.items()},
        )
        for path, module in model.named_modules()
    }


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_those_of_mlx_lms_own_loader_and_the_base_is_untouched(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    base, oracle = loaded(case), loaded(case)
    folder = written(tmp_path / "adapter", base, case)
    before, cold = look(base.model), logits(base)
    adapted = load_adapter(base, folder)
    load_adapters(oracle.model, str(folder)).eval()

    assert look(base.model) == before
    found = logits(adapted)
    assert equal(found, logits(oracle))
    assert equal(logits(base), cold)
    assert equal(found, logits(adapted))
    assert not equal(found, cold)
    assert not any(module.training for _, module in adapted.model.named_modules())
    assert look(base.model) == before


@pytest.mark.parametrize("name", CASES)
def test_base_weights_are_shared_and_nothing_else_is_in_memory(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    base = loaded(case)
    folder = written(tmp_path / "adapter", base, case)
    stored = mx.load(str(folder / WEIGHTS))
    assert isinstance(stored, dict)
    own = sum(array.nbytes for array in stored.values())
    of_base = {id(array) for array in arrays(base.model).values()}
    del stored
    gc.collect()
    before = mx.get_active_memory()

    adapted = load_adapter(base, folder)
    gc.collect()
    page = 16 << 10
    grown = mx.get_active_memory() - before
    of_adapted = arrays(adapted.model)
    number = sum(id(array) not in of_base for array in of_adapted.values())
    assert own <= grown <= own + number * page
    assert adapter_bytes(base, adapted) == own
    assert of_base <= {id(array) for array in of_adapted.values()}
    assert adapter_bytes(base, base) == 0


def test_base_and_adapters_serve_alternately(tmp_path: Path) -> None:
    base = load(LLAMA)
    models = [base]
    models += [
        load_adapter(base, written(tmp_path / str(seed), base, CASES[name], seed))
        for seed, name in enumerate(("lora", "dora", "lora"))
    ]
    prompts = [PROMPT, [7], [1, 2, 3]]
    cold = [[logits(model, tokens) for tokens in prompts] for model in models]
    assert len({each[0].sum().item() for each in cold}) == len(models)

    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=12))
    @settings(max_examples=25)
    def alternate(turns: list[tuple[int, int]]) -> None:
        for which, prompt in turns:
            assert equal(logits(models[which], prompts[prompt]), cold[which][prompt])

    alternate()


def test_steps_of_several_adapters_alternate_over_their_own_caches(tmp_path: Path) -> None:
    base = load(LLAMA)
    models = [base]
    models += [
        load_adapter(base, written(tmp_path / str(seed), base, CASES["lora"], seed))
        for seed in range(2)
    ]

    def steps(model: LoadedModel) -> Any:
        caches = model.make_caches()
        for token in PROMPT:
            step = model.model(mx.array([[token]]), cache=caches)
            mx.eval(step)
            yield step

    cold = [list(steps(model)) for model in models]
    for at, together in enumerate(zip(*map(steps, models), strict=True)):
        assert all(equal(step, cold[which][at]) for which, step in enumerate(together))


def test_an_adapter_reloaded_under_its_name_is_a_new_namespace(tmp_path: Path) -> None:
    """At once, at the same size: neither times nor sizes of files tell it apart."""
    base = load(LLAMA)
    digests = set()
    for seed in (0, 1, 0, 1):
        folder = written(tmp_path / "adapter", base, CASES["lora"], seed)
        adapted = load_adapter(base, folder, name="mine")
        digests.add((seed, namespace_digest(adapted.identity)))
        assert adapted.adapter == "mine"
    assert len(digests) == len({digest for _, digest in digests}) == 2
    assert namespace_digest(base.identity) not in {digest for _, digest in digests}
    assert (base.adapter, base.identity.adapter) == ("", "")


def test_a_namespace_is_the_content_whatever_it_is_called(tmp_path: Path) -> None:
    base = load(LLAMA)
    first = written(tmp_path / "first", base, CASES["lora"])
    other = written(tmp_path / "other", base, CASES["lora"])
    edit_config(other, learning_rate=1.0, dropout=0.0, num_layers=2, scale=10)
    models = [load_adapter(base, first), load_adapter(base, str(other), name="else")]
    assert [model.adapter for model in models] == ["first", "else"]
    assert models[0].identity == models[1].identity
    assert equal(logits(models[0]), logits(models[1]))


def test_the_scale_belongs_to_the_content(tmp_path: Path) -> None:
    base = load(LLAMA)
    folder = written(tmp_path / "adapter", base, CASES["lora"])
    first = load_adapter(base, folder)
    edit_config(folder, scale=11.0)
    second = load_adapter(base, folder)
    assert first.identity.digest != second.identity.digest
    assert not equal(logits(first), logits(second))


def test_tokenizing_takes_turns_across_all_adapters_of_a_base(tmp_path: Path) -> None:
    """The tokenizers of transformers change their own settings while they encode."""
    base = load(LLAMA)
    adapted = load_adapter(base, written(tmp_path / "adapter", base, CASES["lora"]))
    assert adapted.tokenizer is base.tokenizer
    assert adapted._tokenizing is base._tokenizing


def test_loading_reports_its_progress(tmp_path: Path) -> None:
    base = load(LLAMA)
    told: list[Progress] = []
    load_adapter(base, written(tmp_path / "it", base, CASES["lora"]), progress=told.append)
    assert [(each.done, each.total) for each in told] == [(0, 1), (1, 1)]


def rewrite(change: Callable[[dict[str, mx.array]], object]) -> Callable[[Path], None]:
    """Change the weights in a folder."""

    def edit(folder: Path) -> None:
        weights = mx.load(str(folder / WEIGHTS))
        assert isinstance(weights, dict)
        mx.eval(weights)
        change(weights)
        mx.save_safetensors(str(folder / WEIGHTS), weights)

    return edit


def configure(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, **fields)


def text(content: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / CONFIG).write_text(content)

    return edit


def as_peft(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")


Q = "model.layers.0.self_attn.q_proj"
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no configuration": (lambda folder: (folder / CONFIG).unlink(), f"has no {CONFIG}; an adapter"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), f"has no {WEIGHTS}; an adapter"),
    "weights of PEFT": (as_peft, f"of PEFT, which is not supported; .* {WEIGHTS}"),
    "configuration of PEFT": (configure(peft_type="LORA"), "of PEFT, which is not supported"),
    "broken JSON": (text('{"num_layers": 1'), "is broken: JSONDecodeError"),
    "deep JSON": (text("[" * 100_000), "is broken: RecursionError"),
    "no object": (text("[1]"), "holds a list"),
    "full": (configure(fine_tune_type="full"), "is a full fine-tune: load it as a model"),
    "unknown kind": (configure(fine_tune_type="ia3"), "'ia3'; it must be lora or dora"),
    "kind of no text": (configure(fine_tune_type=["lora"]), "must be lora or dora"),
    "no parameters": (configure(lora_parameters=None), "no lora_parameters"),
    "no layers": (configure(num_layers=None), "num_layers is None"),
    "too many layers": (configure(num_layers=3), "it is for 3 layers; the model has 2"),
    "rank of 0": (configure(rank=0), "rank is 0; it must be from 1"),
    "rank of a billion": (configure(rank=10**9), "rank is 1000000000; it must be from 1"),
    "other rank": (configure(rank=5), r"28 of 28 .* at rank 5: .* is 64 x 4 instead of 64 x 5"),
    "no scale": (configure(scale=None), "scale is None"),
    "scale of NaN": (configure(scale=float("nan")), "scale is nan; it must be a finite"),
    "scale beyond floats": (configure(scale=10**400), "it must be a finite number"),
    "keys of no list": (configure(keys="q_proj"), "keys is 'q_proj'; it must be a list"),
    "no such modules": (configure(keys=["attn.c", "b"]), "no modules to adapt among attn.c, b"),
    "no keys": (configure(keys=[]), "no modules to adapt"),
    "modules of another kind": (configure(keys=["input_layernorm"]), "type RMSNorm to LoRA"),
    "fewer layers than weights": (
        configure(num_layers=1),
        r"14 of its 28 weights have no place in the model: model\.layers\.0\..* and 11 more",
    ),
    "foreign weights": (
        rewrite(lambda weights: weights.update({f"{Q}.weight": mx.zeros((2, 2))})),
        f"1 of its 29 weights have no place in the model: {Q}.weight",
    ),
    "half a pair": (
        rewrite(lambda weights: weights.pop(f"{Q}.lora_a")),
        f"1 of 28 weights that its configuration asks for are missing: {Q}.lora_a",
    ),
    "no weights in the file": (rewrite(lambda weights: weights.clear()), "28 of 28 weights .* mis"),
    "other shape": (
        rewrite(lambda weights: weights.update({f"{Q}.lora_b": mx.zeros((4, 63))})),
        f"1 of 28 .* {Q}.lora_b is 4 x 63 instead of 4 x 64",
    ),
    "NaN": (
        rewrite(lambda weights: weights.update({f"{Q}.lora_b": mx.full((4, 64), mx.nan)})),
        f"1 of 28 weights hold NaN or infinity: {Q}.lora_b",
    ),
    "integers": (
        rewrite(lambda weights: weights.update({f"{Q}.lora_b": mx.ones((4, 64), mx.int32)})),
        f"1 of its weights are integers: {Q}.lora_b",
    ),
    "empty": (
        lambda folder: (folder / WEIGHTS).write_bytes(b"") and None,
        r"\(0 bytes\) is broken",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_said_with_its_numbers_and_changes_nothing(
    fault: str, tmp_path: Path
) -> None:
    base = load(LLAMA)
    folder = written(tmp_path / "adapter", base, CASES["lora"])
    edit, message = FAULTS[fault]
    edit(folder)
    before, cold = look(base.model), logits(base)
    with pytest.raises(AdapterError, match=message) as caught:
        load_adapter(base, folder)
    assert "\n" not in str(caught.value)
    assert look(base.model) == before
    assert equal(logits(base), cold)


def test_names_that_lead_nowhere(tmp_path: Path) -> None:
    base = load(LLAMA)
    (tmp_path / "file").touch()
    for path in (tmp_path / "none", tmp_path / "file", "a" * 5000, "~nobody/x", "\0"):
        with pytest.raises(AdapterError):
            load_adapter(base, path)
    with pytest.raises(AdapterError, match="no adapter 7"):
        load_adapter(base, 7)  # type: ignore[arg-type]


def test_one_adapter_at_a_time(tmp_path: Path) -> None:
    base = load(LLAMA)
    folder = written(tmp_path / "adapter", base, CASES["lora"])
    adapted = load_adapter(base, folder)
    with pytest.raises(AdapterError, match="carries the adapter adapter already"):
        load_adapter(adapted, folder)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    wider = load(LLAMA.replace("hidden=64", "hidden=128"))
    folder = written(tmp_path / "adapter", wider, CASES["lora"])
    with pytest.raises(AdapterError, match=r"does not fit synthetic.* 128 x 4 instead of 64 x 4"):
        load_adapter(load(LLAMA), folder)


def test_experts_take_no_dora(tmp_path: Path) -> None:
    base = load(CASES["experts"].spec)
    folder = written(tmp_path / "adapter", base, CASES["experts"])
    edit_config(folder, fine_tune_type="dora")
    with pytest.raises(AdapterError, match=r"dora layers .*SwitchLinear"):
        load_adapter(base, folder)


def test_a_method_that_a_model_compiled_follows_the_copy(tmp_path: Path) -> None:
    base = load(LLAMA)
    base.model.step = mx.compile(base.model.__call__)
    adapted = load_adapter(base, written(tmp_path / "adapter", base, CASES["lora"]))
    tokens = mx.array([PROMPT])
    assert equal(adapted.model.step(tokens), adapted.model(tokens))
    assert not equal(adapted.model.step(tokens), base.model(tokens))


def test_a_model_that_cannot_be_copied_is_refused(tmp_path: Path) -> None:
    """A compiled function that is no method would go on computing with the base."""
    base = load(LLAMA)
    folder = written(tmp_path / "adapter", base, CASES["lora"])

    def step(tokens: mx.array) -> Any:
        return base.model(tokens)

    base.model.step = mx.compile(step)
    with pytest.raises(AdapterError, match="its modules cannot be copied: TypeError"):
        load_adapter(base, folder)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Path]:
    base = load(LLAMA)
    return base, written(tmp_path_factory.mktemp("sound") / "adapter", base, CASES["lora"])


@given(data=st.data())
@settings(max_examples=60)
def test_weights_that_are_cut_off_anywhere_are_refused(
    sound: tuple[LoadedModel, Path], data: st.DataObject
) -> None:
    base, folder = sound
    whole = (folder / WEIGHTS).read_bytes()
    cut = data.draw(st.integers(0, len(whole) - 1))
    try:
        (folder / WEIGHTS).write_bytes(whole[:cut])
        with pytest.raises(AdapterError, match=rf"\({cut:,} bytes\) is broken"):
            load_adapter(base, folder)
    finally:
        (folder / WEIGHTS).write_bytes(whole)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(
    name=st.sampled_from(
        ["num_layers", "fine_tune_type", "lora_parameters", *"rank scale".split()]
    ),
    value=JSON,
)
@settings(max_examples=60)
def test_any_configuration_is_taken_or_refused(
    sound: tuple[LoadedModel, Path], name: str, value: Any
) -> None:
    base, folder = sound
    whole = (folder / CONFIG).read_text()
    try:
        edit_config(folder, **{name: value})
        with suppress(AdapterError):
            load_adapter(base, folder)
    finally:
        (folder / CONFIG).write_text(whole)
