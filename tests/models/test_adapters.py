"""Adapters: the outputs of mlx-lm's own loader, over base weights that are there once."""

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.lora import CONFIG_DEFAULTS, train_model
from mlx_lm.tuner.utils import load_adapters

from mlx_swarm.broker import AdapterError
from mlx_swarm.broker.models import LoadedModel, adapter_bytes, load, load_adapter, namespace_digest
from mlx_swarm.broker.models.adapter_files import WEIGHTS
from mlx_swarm.broker.models.progress import Progress
from tests.models.tiny_adapter import (
    LLAMA,
    PROMPT,
    SIZES,
    edit_config,
    equal,
    logits,
    look,
    write_adapter,
)

TIED = f"{LLAMA}&config.tie_word_embeddings=true"


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


def arrays(model: nn.Module) -> dict[str, Any]:
    return dict(tree_flatten(model.parameters()))


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


class Rows(list[Any]):
    """A data set that mlx-lm's trainer takes: tokens, and where the prompt ends."""

    def process(self, row: Any) -> Any:
        return row


@pytest.mark.parametrize(
    ("architecture", "kind"), [("llama", "lora"), ("llama", "dora"), ("qwen3_moe", "lora")]
)
def test_what_mlx_lms_trainer_writes_gives_the_outputs_of_what_it_trained(
    architecture: str, kind: str, tmp_path: Path
) -> None:
    spec = f"synthetic:{architecture}?{SIZES}"
    trained = load(spec)
    rows = Rows([(list(range(1, 20)), 0)] * 2)
    asked = {"fine_tune_type": kind, "num_layers": 1, "adapter_path": str(tmp_path / "adapter")}
    asked |= {"iters": 2, "batch_size": 1, "val_batches": 1, "learning_rate": 0.1}
    mx.disable_compile()
    try:
        train_model(SimpleNamespace(**{**CONFIG_DEFAULTS, **asked}), trained.model, rows, rows)
    finally:
        mx.enable_compile()
    trained.model.eval()
    adapted = load_adapter(load(spec), tmp_path / "adapter")
    assert equal(logits(adapted), logits(trained))
    assert not equal(logits(adapted), logits(load(spec)))


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
    @settings(max_examples=25, deadline=None)
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


def test_one_adapter_at_a_time(tmp_path: Path) -> None:
    base = load(LLAMA)
    folder = written(tmp_path / "adapter", base, CASES["lora"])
    adapted = load_adapter(base, folder)
    with pytest.raises(AdapterError, match="carries the adapter adapter already"):
        load_adapter(adapted, folder)


def test_a_method_that_a_model_compiled_follows_the_copy(tmp_path: Path) -> None:
    base = load(LLAMA)
    base.model.step = mx.compile(base.model.__call__)
    adapted = load_adapter(base, written(tmp_path / "adapter", base, CASES["lora"]))
    tokens = mx.array([PROMPT])
    assert equal(adapted.model.step(tokens), adapted.model(tokens))
    assert not equal(adapted.model.step(tokens), base.model(tokens))
