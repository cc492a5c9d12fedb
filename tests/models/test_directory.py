"""Loading directories, hub snapshots and whatever else a user may name; each way to fail is one
line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import save_config, save_model

from mlx_swarm.broker.errors import InvalidRequest, ModelError, ModelNotFound, ModelUnreadable
from mlx_swarm.broker.models import LoadedModel, directory, load
from mlx_swarm.broker.models.progress import Progress
from mlx_swarm.broker.request import Message

SPEC = "synthetic:llama?layers=2"


@pytest.fixture(scope="module")
def original() -> LoadedModel:
    return load(SPEC)


@pytest.fixture
def folder(original: LoadedModel, tmp_path: Path) -> Path:
    """The synthetic model as a stock directory."""
    target = tmp_path / "tiny"
    save_model(target, original.model)
    save_config(dict(original.config), target / "config.json")
    original.tokenizer.save_pretrained(target)
    return target


def edited(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def refused(spec: str | Path, said: str, tmp_path: Path) -> ModelError:
    with pytest.raises(ModelError, match=said) as error:
        load(str(spec), cache_dir=tmp_path / "cache")
    assert "\n" not in str(error.value)
    return error.value


def test_a_directory_loads_as_it_was_saved(
    original: LoadedModel, folder: Path, tmp_path: Path
) -> None:
    loaded = load(str(folder), cache_dir=tmp_path / "cache")
    tokens = mx.array([loaded.encode("the same")])
    assert mx.array_equal(loaded.model(tokens), original.model(tokens))
    assert loaded.name == "tiny"
    assert loaded.context_length == 8192


def test_a_directory_in_16_bits_is_cast_when_asked(folder: Path, tmp_path: Path) -> None:
    loaded = load(str(folder), dtype="bfloat16", cache_dir=tmp_path / "cache")
    parameters = dict(tree_flatten(loaded.model.parameters()))
    assert {value.dtype for value in parameters.values()} == {mx.bfloat16}
    assert loaded.dtype == "bfloat16"
    other = load(str(folder), dtype="float32", cache_dir=tmp_path / "cache")
    assert other.identity.digest != loaded.identity.digest


def test_a_truncated_weight_file_is_refused(folder: Path, tmp_path: Path) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    for length in (0, 7, 100, len(content) // 2, len(content) - 1):
        weights.write_bytes(content[:length])
        assert isinstance(refused(folder, "cannot load the model", tmp_path), ModelUnreadable)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["config.json"], "no config.json"),
        (["model.safetensors"], r"no model\*\.safetensors"),
        (["tokenizer.json", "tokenizer_config.json"], "no tokenizer"),
    ],
)
def test_a_missing_file_is_named(folder: Path, tmp_path: Path, names: list[str], said: str) -> None:
    for name in names:
        (folder / name).unlink()
    refused(folder, said, tmp_path)


def test_a_missing_shard_is_named(folder: Path, tmp_path: Path) -> None:
    index = folder / "model.safetensors.index.json"
    edited(index, lambda content: content.update(weight_map={"a": "model-2.safetensors"}))
    refused(folder, r"1 of 1 weight files are missing, the first is model-2\.safetensors", tmp_path)
    index.write_text("{")
    refused(folder, "index.json is broken", tmp_path)


def test_broken_json_and_odd_values_are_refused(folder: Path, tmp_path: Path) -> None:
    config = folder / "config.json"
    whole = config.read_text()
    edited(config, lambda content: content.update(model_type="telepathy"))
    refused(folder, "telepathy", tmp_path)
    config.write_text(whole)
    edited(config, lambda content: content.update(num_hidden_layers=7))
    refused(folder, "cannot load the model", tmp_path)
    config.write_text(whole[:50])
    refused(folder, "cannot load", tmp_path)
    config.write_text(whole)
    (folder / "tokenizer.json").write_text("{")
    refused(folder, "cannot load the tokenizer", tmp_path)


def test_a_dtype_that_no_model_computes_in_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelUnreadable, match="'int4' is not supported; use one of float32"):
        load(str(folder), dtype="int4", cache_dir=tmp_path / "cache")


def test_a_model_without_a_chat_template_still_encodes(folder: Path, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    edited(folder / "tokenizer_config.json", lambda content: content.pop("chat_template", None))
    loaded = load(str(folder), cache_dir=tmp_path / "cache")
    assert loaded.encode("text")
    with pytest.raises(InvalidRequest, match="tiny has no chat template") as error:
        loaded.render([Message("user", "Hello")])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("spec", ["no-such-model", "/no/such/folder", "missing.gguf", "a/b/c", ""])
def test_an_unknown_model_says_what_was_looked_for(spec: str, tmp_path: Path) -> None:
    error = refused(spec, "no model", tmp_path)
    assert isinstance(error, ModelNotFound)
    assert repr(spec) in str(error)


@pytest.mark.parametrize("spec", ["./nothere", "../nothere", ".hidden/model", "~/nothere"])
def test_a_path_is_never_looked_for_on_the_hub(spec: str, tmp_path: Path) -> None:
    stages: list[Progress] = []
    with pytest.raises(ModelNotFound, match=f"no model {spec!r}: /.* does not exist; a model is"):
        load(spec, cache_dir=tmp_path / "cache", progress=stages.append)
    assert stages == []


@pytest.mark.parametrize(
    "spec", ["x" * 5000, "x" * 5000 + ".gguf", "~no-such-user/model", "a\0b", "/dev/null"]
)
def test_a_name_that_no_path_can_have_is_one_line(spec: str, tmp_path: Path) -> None:
    assert isinstance(refused(spec, "no model", tmp_path), ModelNotFound)


@pytest.mark.parametrize(
    "index", ["[]", '{"weight_map": {"a": 5}}', '{"weight_map": {"a": []}}', "[" * 100_000]
)
def test_a_broken_index_of_weights_is_refused(index: str, folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    refused(folder, "index.json is broken", tmp_path)


def test_a_folder_may_be_given_as_a_path(folder: Path, tmp_path: Path) -> None:
    assert load(folder, cache_dir=tmp_path / "cache").name == "tiny"
    with pytest.raises(ModelNotFound, match="no model None"):
        load(None)  # type: ignore[arg-type]


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    refused(tmp_path / "notes.txt", "is not a .gguf file", tmp_path)


def test_a_hub_id_is_served_from_the_hub_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))
    error = refused("someone/tiny", "no model 'someone/tiny'", tmp_path)
    assert str(hub) in str(error)
    assert "the hub cannot be reached" in str(error)
    assert "Error" not in str(error)
    revision = "0" * 40
    shutil.copytree(folder, hub / "models--someone--tiny" / "snapshots" / revision)
    (hub / "models--someone--tiny" / "refs").mkdir()
    (hub / "models--someone--tiny" / "refs" / "main").write_text(revision)
    assert load("someone/tiny", cache_dir=tmp_path / "cache").name == "someone/tiny"


def test_a_directory_that_changes_while_it_is_loaded_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights may be the old ones, and its digests the new ones'."""
    read = directory.read_tokenizer

    def read_and_replace(where: Path) -> Any:
        shutil.copy(where / "config.json", where / "copy")
        (where / "copy").replace(where / "config.json")
        return read(where)

    monkeypatch.setattr(directory, "read_tokenizer", read_and_replace)
    refused(folder, "was changed while it was being loaded; load it again", tmp_path)
    monkeypatch.undo()
    assert load(str(folder), cache_dir=tmp_path / "cache").name == "tiny"
