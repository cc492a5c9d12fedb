"""Small llama GGUF files written with the `gguf` package, and the values that must come out of
them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind

from mlx_swarm.broker.models.tokenizer_building import BYTE_SPECIALS, CHATML, byte_level

Array = npt.NDArray[np.float32]
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, LAYERS = 64, 2, 1, 32, 96, 2
MERGES = ("t h", "th e", "Ġ the")
LAYER_TENSORS = {
    "attn_norm": ("input_layernorm", (HIDDEN,)),
    "attn_q": ("self_attn.q_proj", (HEADS * HEAD_DIM, HIDDEN)),
    "attn_k": ("self_attn.k_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "attn_v": ("self_attn.v_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "attn_output": ("self_attn.o_proj", (HIDDEN, HEADS * HEAD_DIM)),
    "ffn_norm": ("post_attention_layernorm", (HIDDEN,)),
    "ffn_gate": ("mlp.gate_proj", (FEED_FORWARD, HIDDEN)),
    "ffn_up": ("mlp.up_proj", (FEED_FORWARD, HIDDEN)),
    "ffn_down": ("mlp.down_proj", (HIDDEN, FEED_FORWARD)),
}


class Tokens(NamedTuple):
    """A vocabulary as GGUF keeps it."""

    names: list[str]
    kinds: list[int]


def vocabulary() -> Tokens:
    """ChatML's special tokens, the bytes, and three merged tokens."""
    letters = sorted(byte_level().tokenizer["model"]["vocab"].items(), key=lambda entry: entry[1])
    names = [name for name, _ in letters] + [merge.replace(" ", "") for merge in MERGES]
    return Tokens(names, [3 if name in BYTE_SPECIALS else 1 for name in names])


def write_llama(
    path: Path,
    kind: Kind = Kind.F32,
    *,
    tied: bool = True,
    biased: bool = False,
    tokenizer: bool = True,
    changes: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> dict[str, Array]:
    """Write the file; return the values in it by mlx-lm's names, with q and k rows in mlx-lm's
    order.

    `changes` replaces metadata entries (all of them numbers or strings).
    """
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    metadata: dict[str, Any] = {
        "llama.context_length": 512,
        "llama.embedding_length": HIDDEN,
        "llama.block_count": LAYERS,
        "llama.feed_forward_length": FEED_FORWARD,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 5000.0,
        **(changes or {}),
    }
    _add_metadata(writer, metadata, tokenizer)
    expected: dict[str, Array] = {}

    def add(name: str, target: str, shape: tuple[int, ...]) -> None:
        stored = kind if len(shape) > 1 else Kind.F32
        values = random.normal(0, 0.1, shape).astype(np.float32)
        packed = gguf.quants.quantize(values, stored)
        writer.add_tensor(name, packed, raw_dtype=stored)
        exact = gguf.quants.dequantize(packed, stored).reshape(shape)
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
        expected[target] = in_halves(exact, heads) if heads else exact

    add("token_embd.weight", "model.embed_tokens.weight", (len(vocabulary().names), HIDDEN))
    add("output_norm.weight", "model.norm.weight", (HIDDEN,))
    if not tied:
        add("output.weight", "lm_head.weight", (len(vocabulary().names), HIDDEN))
    for layer in range(LAYERS):
        for part, (module, shape) in LAYER_TENSORS.items():
            prefix, target = f"blk.{layer}.{part}", f"model.layers.{layer}.{module}"
            add(f"{prefix}.weight", f"{target}.weight", shape)
            if biased and "attn_" in part and "norm" not in part:
                add(f"{prefix}.bias", f"{target}.bias", shape[:1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def in_halves(values: Array, heads: int) -> Array:
    """Row by row: rotary pairs lie side by side in llama.cpp, and half a head apart in mlx-lm."""
    result = np.empty_like(values)
    half = len(values) // heads // 2
    for head in range(heads):
        start = head * 2 * half
        for pair in range(half):
            result[start + pair] = values[start + 2 * pair]
            result[start + half + pair] = values[start + 2 * pair + 1]
    return result


def _add_metadata(writer: Any, metadata: Mapping[str, Any], tokenizer: bool) -> None:
    for name, value in metadata.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](name, value)
    if tokenizer:
        tokens = vocabulary()
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens.names)
        writer.add_token_types(tokens.kinds)
        writer.add_token_merges(list(MERGES))
        writer.add_eos_token_id(BYTE_SPECIALS.index("<|im_end|>"))
        writer.add_chat_template(CHATML)
