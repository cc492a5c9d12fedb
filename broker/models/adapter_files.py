"""What mlx-lm's trainer leaves in an adapter's folder, read and checked. No MLX.

`adapter_config.json` says how to put LoRA or DoRA layers into a model, `adapters.safetensors` holds
their weights. The configuration is the trainer's whole one; what it says of training is ignored.
"""

import json
import math
import reprlib
from hashlib import sha256
from pathlib import Path
from typing import Any

from msgspec import Struct
from safetensors import SafetensorError, deserialize

from ..errors import AdapterError
from .identity import digest_of
from .reasons import reason_of

CONFIG = "adapter_config.json"
WEIGHTS = "adapters.safetensors"
PEFT_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
EXPECTED = f"an adapter is a folder of mlx-lm with {CONFIG} and {WEIGHTS}"
KINDS = ("lora", "dora")
MAX_RANK = 1 << 16


class AdapterConfig(Struct, frozen=True):
    """How to put an adapter's layers in: into the last `layers` blocks (0 means all), into the
    modules that `keys` names (None: all that can take one)."""

    kind: str
    layers: int
    rank: int
    scale: float
    keys: tuple[str, ...] | None


class AdapterFiles(Struct, frozen=True):
    """An adapter as read: its configuration and the bytes of its weights.

    `digest` is over what decides its outputs: the weights with their names, the kind and the scale.
    The rest of the configuration says which names there are, which loading insists on.
    """

    config: AdapterConfig
    weights: bytes
    digest: str


def read_adapter(folder: Path) -> AdapterFiles:
    """The adapter in `folder`; raises `AdapterError` if there is none, or it is broken.

    The weights are read once: what is loaded is what the digest is of, also where another process
    writes a new version to the same place.
    """
    try:
        if not folder.is_dir():
            raise AdapterError(f"no adapter {str(folder)!r}: there is no such folder; {EXPECTED}")
        config = _read_config(folder)
        _check_there(folder, WEIGHTS)
        weights = (folder / WEIGHTS).read_bytes()
    except OSError as error:
        reason = error.strerror or reason_of(error)
        raise AdapterError(f"cannot read the adapter {folder}: {reason}") from error
    _check_whole(folder / WEIGHTS, weights)
    digest = digest_of([sha256(weights).hexdigest(), config.kind, repr(config.scale)])
    return AdapterFiles(config, weights, digest)


def _read_config(folder: Path) -> AdapterConfig:
    _check_there(folder, CONFIG)
    path = folder / CONFIG
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path} is broken: {reason_of(error)}") from error
    if not isinstance(found, dict):
        raise AdapterError(f"{path} is broken: it holds a {type(found).__name__}, not an object")
    if "peft_type" in found:
        raise AdapterError(f"{folder} is an adapter of PEFT, which is not supported; {EXPECTED}")
    kind = found.get("fine_tune_type", "lora")
    if kind == "full":
        raise AdapterError(
            f"{folder} is a full fine-tune: load it as a model of its own (mlx_lm.fuse makes one)"
        )
    if kind not in KINDS:
        raise AdapterError(
            f"{path}: fine_tune_type is {reprlib.repr(kind)}; it must be lora or dora"
        )
    return _checked(path, kind, found)


def _checked(path: Path, kind: str, found: dict[str, Any]) -> AdapterConfig:
    """The fields that matter; raises `AdapterError` for one that is absent or out of its range."""
    parameters = found.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise AdapterError(f"{path}: it has no lora_parameters (an object with rank and scale)")
    layers, rank, keys = found.get("num_layers"), parameters.get("rank"), parameters.get("keys")
    scale = _finite(parameters.get("scale"))
    if type(layers) is not int:
        raise AdapterError(
            f"{path}: num_layers is {reprlib.repr(layers)}; it must be a whole number"
        )
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise AdapterError(
            f"{path}: rank is {reprlib.repr(rank)}; it must be from 1 to {MAX_RANK:,}"
        )
    if scale is None:
        told = reprlib.repr(parameters.get("scale"))
        raise AdapterError(f"{path}: scale is {told}; it must be a finite number")
    if keys is not None and not (isinstance(keys, list) and all(type(key) is str for key in keys)):
        told = reprlib.repr(keys)
        raise AdapterError(f"{path}: keys is {told}; it must be a list of names of modules")
    return AdapterConfig(kind, max(layers, 0), rank, scale, keys if keys is None else tuple(keys))


def _finite(number: object) -> float | None:
    """A number of JSON that a float can hold."""
    if type(number) not in (int, float):
        return None
    assert isinstance(number, int | float)
    try:
        return float(number) if math.isfinite(number) else None
    except OverflowError:
        return None


def _check_there(folder: Path, name: str) -> None:
    if (folder / name).is_file():
        return
    if any((folder / other).exists() for other in PEFT_WEIGHTS):
        raise AdapterError(f"{folder} is an adapter of PEFT, which is not supported; {EXPECTED}")
    raise AdapterError(f"{folder} has no {name}; {EXPECTED}")


def _check_whole(path: Path, weights: bytes) -> None:
    """MLX finds a cut-off file only while it computes, and may end the process then."""
    try:
        deserialize(weights)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise AdapterError(
            f"{path} ({len(weights):,} bytes) is broken: {reason_of(error)}"
        ) from error
