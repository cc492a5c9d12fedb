"""The head of a safetensors file, so that tensors can be written one after the other as they are
made."""

import json
import math
from collections.abc import Sequence

from .blocks import Part

ITEM_BYTES = {"U32": 4, "F32": 4, "F16": 2, "BF16": 2}


def header_of(parts: Sequence[Part]) -> bytes:
    """Length and JSON header for tensors that follow without gaps in the order of `parts` (full
    names)."""
    entries: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    position = 0
    for name, dtype, shape in parts:
        end = position + math.prod(shape) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
