"""From a GGUF file to a stock mlx-lm model directory, tensor by tensor. No MLX.

The values are kept exactly: quantised blocks become MLX's groups of 32 with the same codes, and the
order of the query and key rows, which llama.cpp interleaves for its rotary embedding, is put back.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..errors import ModelError, ModelUnreadable
from .blocks import BITS, GROUP, Bytes, Part, convert_blocks, parts_of
from .gguf import GGUFFile, TensorInfo
from .gguf_config import FREQUENCIES, LlamaShape, llama_config, llama_shape
from .progress import Progress, ReportProgress
from .reasons import reason_of
from .safetensors_header import header_of
from .tokenizer_building import from_gguf

TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER_PATTERN = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class Target(NamedTuple):
    """Where a tensor goes: the module's path and the parameter; `heads` if its rows must be
    reordered."""

    module: str
    parameter: str
    heads: int


def convert_gguf(source: Path, folder: Path, progress: ReportProgress) -> None:
    """Write config.json, the weights and the tokenizer files of `source` into the empty `folder`.

    Raises `ModelUnreadable` for a broken file, another architecture or an unknown tensor.
    """
    try:
        _convert(source, folder, progress)
    except (ModelError, OSError):
        raise
    except (
        Exception
    ) as error:  # a well-formed file can still hold values of the wrong kind anywhere
        raise ModelUnreadable(f"{source} is broken: {reason_of(error)}") from error


def target_of(name: str, shape: LlamaShape, source: Path) -> Target:
    """The place of a GGUF tensor in mlx-lm's llama model."""
    base, _, parameter = name.rpartition(".")
    if base in TOP_NAMES and parameter == "weight":
        return Target(TOP_NAMES[base], parameter, 0)
    matched = LAYER_PATTERN.fullmatch(name)
    if not matched or matched[2] not in LAYER_NAMES or int(matched[1]) >= shape.layers:
        raise ModelUnreadable(f"{source}: tensor {name!r} has no place in a llama model")
    heads = {"attn_q": shape.heads, "attn_k": shape.kv_heads}.get(matched[2], 0)
    return Target(f"model.layers.{matched[1]}.{LAYER_NAMES[matched[2]]}", matched[3], heads)


def unpermute(rows: Bytes, heads: int) -> Bytes:
    """Undo llama.cpp's interleaving of the two rotary halves of each head. `rows` is [heads * dim,
    bytes]."""
    halves = rows.reshape(heads, -1, 2, rows.shape[-1])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _convert(source: Path, folder: Path, progress: ReportProgress) -> None:
    with GGUFFile(source) as gguf:
        shape = llama_shape(gguf)
        targets = {
            name: target_of(name, shape, source) for name in gguf.tensors if name != FREQUENCIES
        }
        config = llama_config(gguf, shape)
        if quantization := _quantization(gguf, targets):
            config["quantization"] = quantization
        tokenizer = from_gguf(gguf.metadata)
        _write_json(folder / "config.json", config)
        _write_json(folder / "tokenizer.json", tokenizer.tokenizer)
        _write_json(folder / "tokenizer_config.json", tokenizer.config)
        with (folder / "model.safetensors").open("wb") as file:
            _write_weights(gguf, targets, file, progress)


def _write_weights(
    gguf: GGUFFile, targets: dict[str, Target], file: BinaryIO, progress: ReportProgress
) -> None:
    named = [
        part._replace(suffix=_parameter_name(target, part))
        for name, target in targets.items()
        for part in _parts(gguf.tensors[name])
    ]
    file.write(header_of(named))
    for done, (name, target) in enumerate(targets.items(), start=1):
        info = gguf.tensors[name]
        rows = gguf.read(info)
        if target.heads:
            rows = _unpermuted(rows, info, target)
        for content in convert_blocks(info.format.name, rows):
            file.write(content)
        progress(Progress("converting", done, len(targets)))


def _unpermuted(rows: Bytes, info: TensorInfo, target: Target) -> Bytes:
    if len(info.shape) == 1:  # a bias: its values are the rows
        values = rows.reshape(info.shape[0], -1)
        return unpermute(values, target.heads).reshape(rows.shape)
    return unpermute(rows, target.heads)


def _parts(info: TensorInfo) -> list[Part]:
    return parts_of(info.format.name, info.shape)


def _parameter_name(target: Target, part: Part) -> str:
    suffix = target.parameter if part.suffix == "weight" else part.suffix
    return f"{target.module}.{suffix}"


def _quantization(gguf: GGUFFile, targets: dict[str, Target]) -> dict[str, Any] | None:
    """mlx-lm's description of the packed layers: the commonest width, and the modules that
    differ."""
    bits = {
        target.module: BITS[gguf.tensors[name].format.name]
        for name, target in targets.items()
        if gguf.tensors[name].format.name in BITS
    }
    if not bits:
        return None
    [(common, _)] = Counter(bits.values()).most_common(1)
    others = {
        module: {"group_size": GROUP, "bits": width}
        for module, width in bits.items()
        if width != common
    }
    return {"group_size": GROUP, "bits": common, **others}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
