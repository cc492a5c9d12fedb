"""LoRA and DoRA adapters over one copy of the base weights.

An adapted model is a second tree of modules whose base weights are the very arrays of the first; in
some places mlx-lm's own LoRA layers stand around its layers. Nothing of the base changes, and both
serve side by side. The adapter's weights keep the dtype they are stored in, as with mlx-lm: their
product is computed in that dtype or the model's, whichever is wider, and brought to the model's
before it is added. Dropout belongs to training and is left out.
"""

import io
import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from ..errors import AdapterError
from .adapter_files import AdapterConfig, AdapterFiles, read_adapter
from .loaded import LoadedModel
from .progress import Progress, ReportProgress, ignore_progress
from .reasons import reason_of

NAMED = 3
"""So many names are told of a list that may be long."""

Arrays = dict[str, mx.array]


def load_adapter(
    model: LoadedModel,
    path: str | os.PathLike[str],
    *,
    name: str | None = None,
    progress: ReportProgress | None = None,
) -> LoadedModel:
    """`model` with the adapter in the folder `path`, in the thread that owns `model`.

    The folder is what `mlx_lm.lora` writes, for LoRA or DoRA. `name` is the folder's without one;
    the namespace of the result depends on the adapter's content only. Raises `AdapterError`, with
    `model` as it was.
    """
    if model.adapter:
        raise AdapterError(f"{model.name} carries the adapter {model.adapter} already")
    report = progress or ignore_progress
    report(Progress("loading an adapter", 0, 1))
    folder = _folder(path)
    files = read_adapter(folder)
    try:
        module = _put_on(model.model, files)
    except AdapterError as error:
        raise AdapterError(f"the adapter {folder} does not fit {model.name}: {error}") from error
    report(Progress("loading an adapter", 1, 1))
    return model.adapted(module, adapter=name or folder.resolve().name, digest=files.digest)


def adapter_bytes(base: LoadedModel, adapted: LoadedModel) -> int:
    """Bytes of the weights that `adapted` does not share with `base`."""
    return sum(array.nbytes for array in _own(base.model, adapted.model).values())


def _folder(path: str | os.PathLike[str]) -> Path:
    try:
        return Path(path).expanduser()
    except (TypeError, RuntimeError) as error:  # no path at all, or of no user
        raise AdapterError(f"no adapter {path!r}: {reason_of(error)}") from error


def _put_on(base: nn.Module, files: AdapterFiles) -> nn.Module:
    """A tree that shares the arrays of `base` and has the adapter's own beside them."""
    module = _shared_copy(base)
    _add_layers(module, files.config)
    weights = _weights(files)
    _check_fit(_own(base, module), weights, files.config)
    module.load_weights(list(weights.items()), strict=False)
    module.eval()
    return module


def _shared_copy(base: nn.Module) -> nn.Module:
    """Modules and containers anew; arrays as they are."""
    memo = {id(array): array for array in _arrays(base).values()}
    try:
        return deepcopy(base, memo)
    except Exception as error:  # whatever a model holds that cannot be copied
        raise AdapterError(f"its modules cannot be copied: {reason_of(error)}") from error


def _add_layers(module: nn.Module, config: AdapterConfig) -> None:
    """mlx-lm's layers around the model's, with weights that are never computed."""
    blocks = len(getattr(module, "layers", ()))
    if config.layers > blocks:
        raise AdapterError(f"it is for {config.layers} layers; the model has {blocks}")
    parameters = {"rank": config.rank, "scale": config.scale, "dropout": 0.0, "keys": config.keys}
    try:
        linear_to_lora_layers(module, config.layers, parameters, use_dora=config.kind == "dora")
    except Exception as error:  # layers of kinds that mlx-lm does not adapt, or none at all
        raise AdapterError(f"{config.kind} layers cannot be put in: {reason_of(error)}") from error


def _weights(files: AdapterFiles) -> Arrays:
    """The adapter's arrays in memory."""
    try:
        loaded = mx.load(io.BytesIO(files.weights), format="safetensors")
    except Exception as error:  # dtypes that MLX does not have
        raise AdapterError(f"its weights cannot be loaded: {reason_of(error)}") from error
    assert isinstance(loaded, dict)
    mx.eval(loaded)
    return loaded


def _check_fit(expected: Arrays, found: Arrays, config: AdapterConfig) -> None:
    """Raise `AdapterError` unless the names and shapes are the same, and all numbers finite."""
    if not expected:
        names = "its layers" if config.keys is None else _some(config.keys)
        raise AdapterError(f"the model has no modules to adapt among {names}")
    foreign = [name for name in found if name not in expected]
    if foreign:
        raise AdapterError(
            f"{len(foreign)} of its {len(found)} weights have no place in the model: "
            f"{_some(foreign)}"
        )
    absent = [name for name in expected if name not in found]
    if absent:
        raise AdapterError(
            f"{len(absent)} of {len(expected)} weights that its configuration asks for are "
            f"missing: {_some(absent)}; num_layers and keys must name what there is"
        )
    _check_shapes(expected, found, config.rank)
    _check_numbers(found)


def _check_shapes(expected: Arrays, found: Arrays, rank: int) -> None:
    misfits = [
        f"{name} is {_shape(found[name])} instead of {_shape(array)}"
        for name, array in expected.items()
        if found[name].shape != array.shape
    ]
    if misfits:
        raise AdapterError(
            f"{len(misfits)} of {len(expected)} weights have other shapes than the model takes "
            f"at rank {rank}: {_some(misfits)}"
        )


def _check_numbers(found: Arrays) -> None:
    integers = [name for name, array in found.items() if not _is_floating(array)]
    if integers:
        raise AdapterError(f"{len(integers)} of its weights are integers: {_some(integers)}")
    bad = [name for name, array in found.items() if not mx.isfinite(array).all().item()]
    if bad:
        raise AdapterError(f"{len(bad)} of {len(found)} weights hold NaN or infinity: {_some(bad)}")


def _own(base: nn.Module, adapted: nn.Module) -> Arrays:
    """The arrays of `adapted` that are none of those of `base`."""
    shared = {id(array) for array in _arrays(base).values()}
    return {name: array for name, array in _arrays(adapted).items() if id(array) not in shared}


def _arrays(module: nn.Module) -> Mapping[str, mx.array]:
    leaves: list[tuple[str, mx.array]] = tree_flatten(module.parameters())  # type: ignore[assignment]
    return dict(leaves)


def _is_floating(array: mx.array) -> bool:
    return mx.issubdtype(array.dtype, mx.floating)


def _shape(array: mx.array) -> str:
    return " x ".join(str(size) for size in array.shape)


def _some(names: Sequence[str]) -> str:
    rest = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {rest} more" if rest > 0 else "")
