"""Seeded random models of mlx-lm's architectures, at any size, for tests and benchmarks.

The weights are made on the device, a few at a time, so that a model of eight billion takes about as
long as writing its memory. They depend on the seed and each weight's name only.
"""

import hashlib
import importlib
import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import psutil
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..backend import describe
from ..errors import ModelNotFound, ModelUnreadable
from . import embedded
from .directory import context_length, read_tokenizer
from .identity import ModelIdentity, digest_of
from .loaded import LoadedModel
from .progress import Progress, ReportProgress
from .reasons import reason_of
from .synthetic_config import FAMILIES, Sizes, configuration
from .synthetic_spec import SyntheticSpec, parse_spec
from .tokenizer_building import TokenizerFiles, byte_level, padded, size_of
from .weights import dtype_of

BYTES = "bytes"
EVALUATE_BYTES = 256 << 20
# Set by the architecture itself, and meaningful as they are: the poles and steps of state-space
# layers.
KEPT = ("A_log", "D", "dt_bias")
FIELDS = {"kv_heads": "num_key_value_heads", "head_dim": "head_dim", "window": "sliding_window"}


def load_synthetic(
    spec: str, *, dtype: str | None, conversions: Path, progress: ReportProgress
) -> LoadedModel:
    """The model that `spec` describes; raises `ModelNotFound` or `ModelUnreadable` for a bad
    one."""
    asked = parse_spec(spec)
    files = _tokenizer_files(asked, conversions, progress)
    config = {**configuration(asked.architecture, _sizes(asked, files)), **asked.raw}
    computes_in = dtype or asked.words.get("dtype") or _usual_dtype()
    seed = asked.numbers.get("seed", 0)
    with _random_state(seed):
        model = _build(asked, config)
    _fill(model, seed, dtype_of(computes_in), progress)
    files = padded(files, config["vocab_size"])
    backend = describe()
    made_by = ["synthetic", str(seed), backend.device, backend.mlx_version]
    identity = ModelIdentity(
        config=digest_of([json.dumps(config, sort_keys=True)]),
        tokenizer=digest_of([json.dumps(files, sort_keys=True)]),
        weights=digest_of([*made_by, metadata.version("mlx-lm")]),
        dtype=computes_in,
    )
    return LoadedModel(
        name=spec,
        model=model,
        tokenizer=_wrapped(files),
        config=config,
        identity=identity,
        context_length=context_length(config),
    )


def _usual_dtype() -> str:
    return "float32" if describe().device == "cpu" else "bfloat16"


def _tokenizer_files(
    asked: SyntheticSpec, conversions: Path, progress: ReportProgress
) -> TokenizerFiles:
    name = asked.words.get("tokenizer", BYTES)
    if name == BYTES:
        return byte_level()
    if name != embedded.NAME:
        raise ModelNotFound(f"no tokenizer {name!r}; there are {BYTES} and {embedded.NAME}")
    folder = embedded.embedded_directory(conversions, progress)
    names = ("tokenizer.json", "tokenizer_config.json")
    return TokenizerFiles(*(json.loads((folder / name).read_bytes()) for name in names))


def _sizes(asked: SyntheticSpec, files: TokenizerFiles) -> Sizes:
    given = asked.numbers
    heads = given.get("heads", 4)
    head_dim = given.get("head_dim", given["hidden"] // heads if "hidden" in given else 16)
    hidden = given.get("hidden", heads * head_dim)
    kv_heads = given.get("kv_heads", heads // 2 if heads % 2 == 0 else heads)
    vocabulary = given.get("vocab", size_of(files))
    if heads % kv_heads or head_dim < 1:
        raise ModelUnreadable(
            f"{heads} heads of {head_dim} with {kv_heads} KV heads and a hidden size of {hidden} "
            "do not fit together"
        )
    if vocabulary < size_of(files):
        raise ModelUnreadable(
            f"a vocabulary of {vocabulary} is too small for a tokenizer of {size_of(files)} tokens"
        )
    return Sizes(
        layers=given.get("layers", 4),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=given.get("intermediate", 2 * hidden),
        vocabulary=vocabulary,
        context=given.get("context", 8192),
        window=given.get("window", 0),
    )


@contextmanager
def _random_state(seed: int) -> Iterator[None]:
    """Some architectures draw what is kept from MLX's global state, which goes on as it would."""
    after = mx.random.randint(0, (1 << 31) - 1).item()
    assert isinstance(after, int)
    mx.random.seed(seed)
    try:
        yield
    finally:
        mx.random.seed(after)


def _build(asked: SyntheticSpec, config: dict[str, Any]) -> nn.Module:
    """The model with its parameters still to be computed."""
    name = asked.architecture
    try:
        module = importlib.import_module(f"mlx_lm.models.{name}")
        model_class, arguments = module.Model, module.ModelArgs
    except (ImportError, AttributeError) as error:
        known = ", ".join(FAMILIES)
        raise ModelNotFound(
            f"mlx-lm {metadata.version('mlx-lm')} has no architecture {name!r}; "
            f"ready-made are {known}"
        ) from error
    accepted = set(arguments.__dataclass_fields__)
    ignored = [
        size for size, field in FIELDS.items() if size in asked.numbers and field not in accepted
    ]
    ignored += [f"config.{field}" for field in asked.raw if field not in accepted]
    if ignored:
        raise ModelUnreadable(f"{name} has no {' and no '.join(ignored)}")
    try:
        model: nn.Module = model_class(arguments.from_dict(config))
    except Exception as error:  # whatever a configuration that does not fit leads to
        raise ModelUnreadable(
            f"{name} cannot be made: {reason_of(error)} (set what is missing as config.NAME=VALUE)"
        ) from error
    model.eval()
    return model


def _fill(model: nn.Module, seed: int, dtype: mx.Dtype, progress: ReportProgress) -> None:
    parameters: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    may_cast = getattr(model, "cast_predicate", lambda path: True)
    _check_memory(parameters, dtype)
    made: list[tuple[str, mx.array]] = []
    waiting = 0
    for path, value in parameters:
        as_dtype = dtype if may_cast(path) else value.dtype
        made.append((path, _weight(path, value, seed, as_dtype)))
        waiting += made[-1][1].nbytes
        # All at once, the random bits of all layers would be in memory at the same time.
        if waiting > EVALUATE_BYTES:
            mx.eval([array for _, array in made])
            progress(Progress("making weights", len(made), len(parameters)))
            waiting = 0
    model.update(tree_unflatten(made))
    mx.eval(model.parameters())
    progress(Progress("making weights", len(parameters), len(parameters)))


def _check_memory(parameters: list[tuple[str, mx.array]], dtype: mx.Dtype) -> None:
    """MLX's CPU build ends the process, without a word, where an allocation fails."""
    wanted = sum(value.size for _, value in parameters) * dtype.size
    memory = int(mx.device_info().get("memory_size") or psutil.virtual_memory().total)
    if wanted > memory:
        raise ModelUnreadable(
            f"its weights need {wanted / 2**30:,.1f} GiB; this machine has {memory / 2**30:,.1f}"
        )


def _weight(path: str, value: mx.array, seed: int, dtype: mx.Dtype) -> mx.array:
    """Uniform, with the variance that keeps activations at their size; norms stay as they are."""
    if not mx.issubdtype(value.dtype, mx.floating):
        return value
    owner, _, name = path.rpartition(".")
    is_vector = value.ndim < 2 and not name.endswith(("bias", "sinks"))
    if is_vector or name in KEPT or "norm" in owner.rpartition(".")[2]:
        return value.astype(dtype)
    inputs = math.prod(value.shape[1:]) if "conv" in path else value.shape[-1]
    bound = math.sqrt(3 / inputs)
    key = mx.random.key(int.from_bytes(hashlib.sha256(f"{seed}:{path}".encode()).digest()[:8]))
    return mx.random.uniform(-bound, bound, value.shape, dtype, key)


def _wrapped(files: TokenizerFiles) -> TokenizerWrapper:
    """Through files, because that is how mlx-lm makes a tokenizer."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "tokenizer.json").write_text(json.dumps(files.tokenizer), "utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(files.config), "utf-8")
        return read_tokenizer(folder)
