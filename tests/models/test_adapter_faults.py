"""Adapters that are broken or do not fit: what is said of them, and that their base stays."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_swarm.broker import AdapterError
from mlx_swarm.broker.models import LoadedModel, load, load_adapter
from mlx_swarm.broker.models.adapter_files import CONFIG, WEIGHTS
from tests.models.tiny_adapter import LLAMA, SIZES, edit_config, equal, logits, look, write_adapter


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
    folder = write_adapter(tmp_path / "adapter", base.model)
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


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    wider = load(LLAMA.replace("hidden=64", "hidden=128"))
    folder = write_adapter(tmp_path / "adapter", wider.model)
    with pytest.raises(AdapterError, match=r"does not fit synthetic.* 128 x 4 instead of 64 x 4"):
        load_adapter(load(LLAMA), folder)


def test_experts_take_no_dora(tmp_path: Path) -> None:
    base = load(f"synthetic:qwen3_moe?{SIZES}")
    folder = write_adapter(tmp_path / "adapter", base.model)
    edit_config(folder, fine_tune_type="dora")
    with pytest.raises(AdapterError, match=r"dora layers .*SwitchLinear"):
        load_adapter(base, folder)


def test_a_model_that_cannot_be_copied_is_refused(tmp_path: Path) -> None:
    """A compiled function that is no method would go on computing with the base."""
    base = load(LLAMA)
    folder = write_adapter(tmp_path / "adapter", base.model)

    def step(tokens: mx.array) -> Any:
        return base.model(tokens)

    base.model.step = mx.compile(step)
    with pytest.raises(AdapterError, match="its modules cannot be copied: TypeError"):
        load_adapter(base, folder)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Path]:
    base = load(LLAMA)
    return base, write_adapter(tmp_path_factory.mktemp("sound") / "adapter", base.model)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
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
@settings(max_examples=60, deadline=None)
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
