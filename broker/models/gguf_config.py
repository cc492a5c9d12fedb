"""config.json of a llama model, from the metadata of its GGUF file. No MLX."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..errors import ModelUnreadable
from .gguf import GGUFFile

ARCHITECTURE = "llama"
SOURCE = "converted_from"
FREQUENCIES = "rope_freqs.weight"
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_ORIGINAL = 1.0, 4.0, 8192


class LlamaShape(NamedTuple):
    """The sizes that decide where tensors go and how their rows are ordered."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int


def llama_shape(gguf: GGUFFile) -> LlamaShape:
    """Read and cross-check the sizes; raises `ModelUnreadable` for another architecture or a
    mismatch."""
    architecture = gguf.metadata.get("general.architecture")
    if architecture != ARCHITECTURE or gguf.metadata.get("llama.expert_count"):
        kind = "llama with experts" if architecture == ARCHITECTURE else repr(architecture)
        raise ModelUnreadable(f"{gguf.path}: its architecture is {kind}; plain llama is supported")
    hidden, heads = _size(gguf, "embedding_length"), _size(gguf, "attention.head_count")
    head_dim = _size(gguf, "attention.key_length", hidden // heads)
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelUnreadable(f"{gguf.path} is incomplete: it has no matrix token_embd.weight")
    shape = LlamaShape(
        layers=_size(gguf, "block_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=_size(gguf, "attention.head_count_kv", heads),
        head_dim=head_dim,
        feed_forward=_size(gguf, "feed_forward_length"),
        vocabulary=embedding.shape[0],
    )
    _check_tensors(gguf, shape)
    if _size(gguf, "rope.dimension_count", head_dim) != head_dim or head_dim % 2:
        raise ModelUnreadable(
            f"{gguf.path}: rotary embedding of a part of the head is not supported"
        )
    return shape


def llama_config(gguf: GGUFFile, shape: LlamaShape) -> dict[str, Any]:
    """config.json for mlx-lm's llama model, without its quantization."""
    metadata = gguf.metadata
    has_bias = any(name.endswith(".bias") for name in gguf.tensors)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        SOURCE: "gguf",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.feed_forward,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "rms_norm_eps": _positive(gguf, "attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": _positive(gguf, "rope.freq_base", 10000.0),
        "max_position_embeddings": _size(gguf, "context_length"),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": has_bias,
        "eos_token_id": _stop_ids(metadata),
    }
    if (bos := metadata.get("tokenizer.ggml.bos_token_id")) is not None:
        config["bos_token_id"] = bos
    if scaling := _rope_scaling(gguf, shape):
        config["rope_scaling"] = scaling
    return config


def _size(gguf: GGUFFile, name: str, default: int | None = None) -> int:
    value = gguf.metadata.get(f"llama.{name}", default)
    if not isinstance(value, int) or value < 1:
        raise ModelUnreadable(f"{gguf.path} is incomplete: llama.{name} is {value}")
    return value


def _positive(gguf: GGUFFile, name: str, default: float) -> float:
    value = gguf.metadata.get(f"llama.{name}", default)
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelUnreadable(f"{gguf.path} is broken: llama.{name} is {value!r}")
    return value


def _check_tensors(gguf: GGUFFile, shape: LlamaShape) -> None:
    """Every weight must be there, as large as the sizes say, before anything is converted."""
    for name, wanted in _weights(shape):
        info = gguf.tensors.get(name)
        if info is None:
            raise ModelUnreadable(f"{gguf.path} is incomplete: it has no tensor {name!r}")
        if info.shape != wanted:
            raise ModelUnreadable(
                f"{gguf.path}: tensor {name!r} has shape {info.shape} instead of {wanted}"
            )
    for name, info in gguf.tensors.items():
        weight = gguf.tensors.get(f"{name.removesuffix('.bias')}.weight")
        if name.endswith(".bias") and weight is not None and info.shape != weight.shape[:1]:
            raise ModelUnreadable(
                f"{gguf.path}: tensor {name!r} has shape {info.shape} instead of {weight.shape[:1]}"
            )


def _weights(shape: LlamaShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the weights; lazily, because a broken file may claim a billion layers."""
    hidden, attention = shape.hidden, shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    layer = {
        "attn_norm": (hidden,),
        "attn_q": (attention, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, attention),
        "ffn_norm": (hidden,),
        "ffn_gate": (shape.feed_forward, hidden),
        "ffn_up": (shape.feed_forward, hidden),
        "ffn_down": (hidden, shape.feed_forward),
    }
    yield "token_embd.weight", (shape.vocabulary, hidden)
    yield "output_norm.weight", (hidden,)
    for number in range(shape.layers):
        for name, wanted in layer.items():
            yield f"blk.{number}.{name}.weight", wanted


def _stop_ids(metadata: dict[str, Any]) -> list[int]:
    roles = ("eos", "eot", "eom")
    found = (metadata.get(f"tokenizer.ggml.{role}_token_id") for role in roles)
    return list(dict.fromkeys(index for index in found if isinstance(index, int)))


def _rope_scaling(gguf: GGUFFile, shape: LlamaShape) -> dict[str, Any] | None:
    kind = gguf.metadata.get("llama.rope.scaling.type", "none")
    if FREQUENCIES in gguf.tensors and kind == "none":
        return _llama3_scaling(gguf, shape)
    if kind == "none":
        return None
    if kind == "linear":
        return {"type": "linear", "factor": _positive(gguf, "rope.scaling.factor", 1.0)}
    raise ModelUnreadable(f"{gguf.path}: rope scaling {kind!r} is not supported")


def _llama3_scaling(gguf: GGUFFile, shape: LlamaShape) -> dict[str, Any]:
    """Recover Llama 3's scaling from the divisor of each frequency, which is all that the file
    keeps."""
    found = gguf.read(gguf.tensors[FREQUENCIES]).view(np.float32).ravel()
    factor = float(found.max())
    base = _positive(gguf, "rope.freq_base", 10000.0)
    wavelength = 2 * np.pi * base ** (np.arange(0, shape.head_dim, 2) / shape.head_dim)
    turns = LLAMA3_ORIGINAL / wavelength
    blend = np.clip((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW), 0, 1)
    expected = 1 / ((1 - blend) / factor + blend)
    if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-3):
        raise ModelUnreadable(
            f"{gguf.path}: the rope frequencies are not those of Llama 3's scaling"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_ORIGINAL,
    }
