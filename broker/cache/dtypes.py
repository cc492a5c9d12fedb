"""Dtypes by name, as files and layouts have them. MLX is imported only for its own objects."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mlx.core as mx

_ITEM_BYTES = {
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
}


def item_bytes(name: str) -> int:
    """Bytes of one number of that dtype."""
    return _ITEM_BYTES[name]


def dtype_of(name: str) -> "mx.Dtype":
    """MLX's dtype of that name."""
    import mlx.core as mx

    dtype = getattr(mx, name)
    assert isinstance(dtype, mx.Dtype)
    return dtype


def dtype_name(dtype: "mx.Dtype") -> str:
    """The name of an MLX dtype, such as `bfloat16`."""
    return str(dtype).rpartition(".")[2]
