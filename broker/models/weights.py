"""The dtype a model computes in, and bringing its weights there."""

from collections import Counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import dequantize_model

from ..backend import describe
from ..errors import ModelUnreadable

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def dtype_of(name: str) -> mx.Dtype:
    """The MLX dtype of this name; raises `ModelUnreadable` for one a model cannot compute in."""
    if name not in DTYPES:
        raise ModelUnreadable(f"dtype {name!r} is not supported; use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def prepare(model: nn.Module, dtype: str | None, stored: str | None) -> str:
    """Cast the weights, lazily, and return the name of the dtype the model then computes in.

    Without `dtype` that is float32 on the CPU backend, where 16-bit arithmetic is very slow, and
    `stored` (or what most weights are stored in) elsewhere. Quantised weights are dequantised on
    the CPU backend only.
    """
    on_cpu = describe().device == "cpu"
    wanted = dtype or ("float32" if on_cpu else stored or common_dtype(model))
    cast(model, dtype_of(wanted))
    if on_cpu:
        dequantize_model(model)
        cast(model, dtype_of(wanted))
    return wanted


def cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Cast every floating-point weight that the model does not want to keep in float32."""
    may_cast = getattr(model, "cast_predicate", lambda path: True)

    def converted(path: str, value: Any) -> Any:
        is_float = mx.issubdtype(value.dtype, mx.floating)
        return value.astype(dtype) if is_float and may_cast(path) else value

    model.update(tree_map_with_path(converted, model.parameters()))


def common_dtype(model: nn.Module) -> str:
    """The floating-point dtype that most weights have (scales, for quantised ones)."""
    sizes: Counter[str] = Counter()
    parameters: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    for _, value in parameters:
        if mx.issubdtype(value.dtype, mx.floating):
            sizes[str(value.dtype).removeprefix("mlx.core.")] += value.size
    return sizes.most_common(1)[0][0] if sizes else "float32"
