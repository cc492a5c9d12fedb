"""Adapters with random weights, in the files of mlx-lm's trainer, and looks at what they change."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_swarm.broker.models import LoadedModel
from mlx_swarm.broker.models.adapter_files import CONFIG, WEIGHTS

SIZES = "layers=2&hidden=64&heads=4&kv_heads=2&intermediate=64&context=256&seed=3"
LLAMA = f"synthetic:llama?{SIZES}"
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
OF_TRAINING = {"learning_rate": 1e-5, "model": "some/model", "num_layers": -1, "seed": 0}


def write_adapter(
    folder: Path,
    model: nn.Module,
    *,
    kind: str = "lora",
    keys: list[str] | None = None,
    layers: int = -1,
    rank: int = 4,
    scale: float = 10.0,
    seed: int = 0,
    dtype: mx.Dtype = mx.float32,
) -> Path:
    """Write an adapter for `model` to `folder`, which is returned; every weight changes outputs."""
    parameters: dict[str, Any] = {"rank": rank, "scale": scale, "dropout": 0.5}
    if keys is not None:
        parameters["keys"] = keys
    trained = deepcopy(model)
    trained.freeze()
    linear_to_lora_layers(trained, layers, parameters, use_dora=kind == "dora")
    folder.mkdir(parents=True, exist_ok=True)
    mx.random.seed(seed)
    leaves: list[tuple[str, mx.array]] = tree_flatten(trained.trainable_parameters())  # type: ignore[assignment]
    weights = {name: _random(name, array).astype(dtype) for name, array in leaves}
    mx.save_safetensors(str(folder / WEIGHTS), weights)
    asked = {"fine_tune_type": kind, "num_layers": layers, "lora_parameters": parameters}
    (folder / CONFIG).write_text(json.dumps({**OF_TRAINING, **asked}, indent=4))
    return folder


def edit_config(folder: Path, **fields: Any) -> None:
    """Set fields of the configuration; those named rank, scale and keys in lora_parameters."""
    config = json.loads((folder / CONFIG).read_bytes())
    for name, value in fields.items():
        of_lora = name in ("rank", "scale", "keys", "dropout")
        (config["lora_parameters"] if of_lora else config)[name] = value
    (folder / CONFIG).write_text(json.dumps(config))


def logits(model: LoadedModel, tokens: list[int] = PROMPT) -> mx.array:
    found: mx.array = model.model(mx.array([tokens]), cache=model.make_caches())
    mx.eval(found)
    return found


def equal(some: mx.array, other: mx.array) -> bool:
    return some.dtype == other.dtype and bool(mx.array_equal(some, other).item())


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


def _random(name: str, array: mx.array) -> mx.array:
    if name.endswith(".m"):
        return array * mx.random.uniform(0.7, 1.3, array.shape)
    return mx.random.uniform(-0.1, 0.1, array.shape)
