"""The dtype a model computes in, and bringing its weights there."""

from collections import Counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten
from mlx_lm.utils import dequantize_model

from ..backend import describe
from ..errors import ModelUnreadable

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def dtype_of(name: str) -> mx.Dtype:
    """The MLX dtype of this name; raises `ModelUnreadable` for one a model cannot compute in."""
    if name not in DTYPES:
        raise ModelUnreadable(f"dtype {name!r} is not supported; use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def prepare(model: nn.Module, dtype: str | None, *, mixed: bool) -> str:
    """Cast the weights, lazily, and return the name of the dtype that the model then computes in.

    Without `dtype` that is float32 on the CPU backend, where 16-bit arithmetic is very slow, and as
    stored elsewhere. `mixed` weights (GGUF has float32 norms beside 16-bit scales) are brought to
    what most of them are. Quantised weights are dequantised on the CPU backend only.
    """
    on_cpu = describe().device == "cpu"
    computes_in = dtype or ("float32" if on_cpu else common_dtype(model))
    wanted = dtype_of(computes_in)
    if dtype or on_cpu or mixed:
        cast(model, wanted)
    if on_cpu:
        dequantize(model)
        cast(model, wanted)
    return computes_in


def cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Cast every floating-point weight, except those that the model keeps in float32."""
    may_cast = getattr(model, "cast_predicate", lambda path: True)

    def converted(path: str, value: Any) -> Any:
        is_float = mx.issubdtype(value.dtype, mx.floating)
        return value.astype(dtype) if is_float and may_cast(path) else value

    model.update(tree_map_with_path(converted, model.parameters()))


def dequantize(model: nn.Module) -> None:
    """Replace quantised layers by plain ones.

    MLX's CPU build dequantises value by value; for the common layouts whole-array operations give
    the same values at a multiple of the speed. What they do not cover is left to mlx-lm.
    """
    plain: list[tuple[str, nn.Module]] = []
    for path, layer in model.named_modules():
        if isinstance(layer, (nn.QuantizedLinear, nn.QuantizedEmbedding)) and _is_common(layer):
            weight = _values(layer)
            rows, columns = weight.shape
            replacement: Any = nn.Embedding(rows, columns)
            if isinstance(layer, nn.QuantizedLinear):
                replacement = nn.Linear(columns, rows, bias=False)
            if "bias" in layer:
                replacement.bias = layer.bias
            replacement.weight = weight
            plain.append((path, replacement))
    model.update_modules(tree_unflatten(plain))
    dequantize_model(model)


def common_dtype(model: nn.Module) -> str:
    """The floating-point dtype that most weights have (their scales, for quantised ones)."""
    parameters: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    sizes: Counter[str] = Counter()
    for _, value in parameters:
        if mx.issubdtype(value.dtype, mx.floating):
            sizes[str(value.dtype).removeprefix("mlx.core.")] += value.size
    return sizes.most_common(1)[0][0] if sizes else "float32"


def _is_common(layer: Any) -> bool:
    return layer.mode == "affine" and layer.bits in (4, 8)


def _values(layer: Any) -> mx.array:
    codes = layer.weight.view(mx.uint8)
    if layer.bits == 4:
        codes = mx.stack([codes & 0x0F, codes >> 4], axis=-1)
    scales, biases = layer.scales[..., None], layer.biases[..., None]
    groups = codes.reshape(*layer.scales.shape, layer.group_size).astype(scales.dtype)
    values: mx.array = groups * scales + biases
    return values.reshape(layer.weight.shape[0], -1)
