"""The bytes of single tokens, also of those that are only a piece of a character."""

import re
from collections.abc import Callable, Sequence
from functools import cache

from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)

SPM_SPACE = "\u2581"

_SPM_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: TokenizerWrapper, tokens: Sequence[int]) -> list[bytes]:
    """The bytes of each token; none for one that only pads the vocabulary."""
    size = len(tokenizer)
    piece_bytes = _reading(tokenizer)
    known = [token for token in tokens if 0 <= token < size]
    pieces = dict(zip(known, tokenizer.convert_ids_to_tokens(known), strict=True))
    return [piece_bytes(token, pieces.get(token)) for token in tokens]


def _reading(tokenizer: TokenizerWrapper) -> Callable[[int, str | None], bytes]:
    """How a piece of this tokenizer is read."""
    detokenizer = tokenizer.detokenizer
    if isinstance(detokenizer, BPEStreamingDetokenizer):
        return lambda token, piece: _byte_level(piece or "")
    if isinstance(detokenizer, SPMStreamingDetokenizer):
        return lambda token, piece: _sentencepiece(piece or "")
    return lambda token, piece: _decoded(tokenizer, token) if piece is not None else b""


def _byte_level(piece: str) -> bytes:
    alphabet = _alphabet()
    return b"".join(alphabet.get(char) or char.encode() for char in piece)


def _sentencepiece(piece: str) -> bytes:
    if found := _SPM_BYTE.fullmatch(piece):
        return bytes.fromhex(found[1])
    return piece.replace(SPM_SPACE, " ").encode()


def _decoded(tokenizer: TokenizerWrapper, token: int) -> bytes:
    return str(tokenizer.decode([token], skip_special_tokens=False)).encode()


@cache
def _alphabet() -> dict[str, bytes]:
    """What byte-level BPE writes for each byte: printable ones as they are, others from U+0100 on
    in their order (the scheme of GPT-2's tokenizer).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): bytes([byte]) for byte in printable}
    return table | {chr(0x100 + at): bytes([byte]) for at, byte in enumerate(others)}
