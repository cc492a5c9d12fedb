"""Loading a stock mlx-lm model directory, with errors that say what is missing or broken in it."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_config, load_model, load_tokenizer

from ..errors import ModelUnreadable
from .gguf_config import SOURCE
from .identity import WEIGHT_FILES, facts_of, identity_of
from .loaded import LoadedModel
from .progress import Progress, ReportProgress
from .reasons import reason_of
from .weights import prepare

CONTEXT_KEYS = (
    "max_position_embeddings",
    "max_sequence_length",
    "max_seq_len",
    "n_positions",
    "n_ctx",
    "seq_length",
    "model_max_length",
)
CONTEXT_UNLIMITED = 1 << 20
TOKENIZER_SOURCES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "*.tiktoken")


def load_directory(
    folder: Path, *, name: str, dtype: str | None, cache: Path, progress: ReportProgress
) -> LoadedModel:
    """The model in `folder`; raises `ModelUnreadable` if it is incomplete, broken or not
    supported."""
    check_complete(folder)
    before = facts_of(folder)
    progress(Progress("loading", 0, 1))
    with ThreadPoolExecutor(1) as pool:
        # Reading the tokenizer is Python's work, and takes as long as reading the weights.
        reading = pool.submit(read_tokenizer, folder)
        model, config, computes_in = _read_model(folder, dtype)
        tokenizer = reading.result()
    identity = identity_of(folder, computes_in, cache, progress)
    if facts_of(folder) != before:
        raise ModelUnreadable(f"{folder} was changed while it was being loaded; load it again")
    progress(Progress("loading", 1, 1))
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=tokenizer,
        config=config,
        identity=identity,
        context_length=context_length(config),
    )


def check_complete(folder: Path) -> None:
    """Raise `ModelUnreadable`, naming the file, unless every file of a model is there."""
    if not (folder / "config.json").is_file():
        raise ModelUnreadable(f"{folder} is not a model directory: it has no config.json")
    if not any(folder.glob(WEIGHT_FILES)):
        raise ModelUnreadable(f"{folder} is incomplete: it has no {WEIGHT_FILES}")
    if not any(path for pattern in TOKENIZER_SOURCES for path in folder.glob(pattern)):
        raise ModelUnreadable(
            f"{folder} is incomplete: it has no tokenizer "
            f"(looked for {', '.join(TOKENIZER_SOURCES)})"
        )
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_bytes())["weight_map"].values())
            absent = sorted(shard for shard in shards if not (folder / shard).is_file())
        except (
            ValueError,
            LookupError,
            AttributeError,
            TypeError,
            OSError,
            RecursionError,
        ) as error:
            raise ModelUnreadable(f"{index} is broken: {reason_of(error)}") from error
        if absent:
            raise ModelUnreadable(
                f"{folder} is incomplete: {len(absent)} of {len(shards)} weight files are missing, "
                f"the first is {absent[0]}"
            )


def read_tokenizer(folder: Path) -> TokenizerWrapper:
    """The tokenizer in `folder`, with the stop tokens that the model's configuration (if any)
    names."""
    try:
        has_config = (folder / "config.json").is_file()
        stops = load_config(folder).get("eos_token_id") if has_config else None
        return load_tokenizer(folder, eos_token_ids=stops)
    except Exception as error:  # transformers and tokenizers raise bare Exceptions too
        raise ModelUnreadable(
            f"cannot load the tokenizer in {folder}: {reason_of(error)}"
        ) from error


def context_length(config: dict[str, Any]) -> int:
    """The longest sequence in tokens; models that state none (state-space models) have no limit of
    their own."""
    for source in (config, config.get("text_config") or {}):
        for key in CONTEXT_KEYS:
            value = source.get(key)
            if isinstance(value, int) and value > 0:
                return value
    return CONTEXT_UNLIMITED


def _read_model(folder: Path, dtype: str | None) -> tuple[nn.Module, dict[str, Any], str]:
    """The model with its weights in memory, its configuration, and the dtype it computes in."""
    try:
        model, config = load_model(folder, lazy=True)
        computes_in = prepare(model, dtype, mixed=config.get(SOURCE) == "gguf")
        mx.eval(model.parameters())
        mx.clear_cache()
    except ModelUnreadable:
        raise
    except Exception as error:  # mlx-lm raises whatever the first missing or odd value leads to
        raise ModelUnreadable(f"cannot load the model in {folder}: {reason_of(error)}") from error
    return model, config, computes_in
