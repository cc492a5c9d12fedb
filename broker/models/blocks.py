"""From GGUF's blocks to MLX's packed groups, exactly: the same codes, scales and offsets, laid out
anew. No MLX.

MLX stores a value as `scale * code + bias` with one scale and bias for each group of 32 along a
row, and packs the codes into little-endian uint32 words, the first value in the lowest bits.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

GROUP = 32
BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
STORED_AS = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
ZERO_POINT = {"Q4_0": 8, "Q8_0": 128}

Bytes = npt.NDArray[np.uint8]


class Part(NamedTuple):
    """One array of a converted tensor: `suffix` of its name, dtype as safetensors names it,
    shape."""

    suffix: str
    dtype: str
    shape: tuple[int, ...]


def parts_of(format_name: str, shape: tuple[int, ...]) -> list[Part]:
    """What a tensor of this format and shape becomes, without reading it."""
    if format_name in STORED_AS:
        return [Part("weight", STORED_AS[format_name], shape)]
    *rows, columns = shape
    groups = (*rows, columns // GROUP)
    return [
        Part("weight", "U32", (*rows, columns * BITS[format_name] // 32)),
        Part("scales", "F16", groups),
        Part("biases", "F16", groups),
    ]


def convert_blocks(format_name: str, rows: Bytes) -> list[bytes]:
    """The contents of `parts_of`, in its order. `rows` is uint8 [rows, bytes of a row]."""
    if format_name in STORED_AS:
        return [rows.tobytes()]
    blocks = rows.reshape(-1, {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[format_name])
    scales = blocks[:, :2].copy().view(np.float16)
    if format_name == "Q4_1":
        return [_pack_nibbles(blocks[:, 4:]), scales.tobytes(), blocks[:, 2:4].tobytes()]
    with np.errstate(over="ignore"):  # a scale that large is no weight's; it ends as infinity
        biases = scales * np.float16(-ZERO_POINT[format_name])
    codes = _pack_nibbles(blocks[:, 2:]) if format_name == "Q4_0" else _unsigned(blocks[:, 2:])
    return [codes, scales.tobytes(), biases.tobytes()]


def _pack_nibbles(packed: Bytes) -> bytes:
    """GGUF keeps values 0 to 15 of a block in the low nibbles and 16 to 31 in the high ones."""
    codes = np.concatenate([packed & 0x0F, packed >> 4], axis=1)
    packed_again: Bytes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return packed_again.tobytes()


def _unsigned(codes: Bytes) -> bytes:
    """int8 to uint8 with a zero point of 128: flipping the sign bit adds 128."""
    return np.bitwise_xor(codes, 0x80, dtype=np.uint8).tobytes()
