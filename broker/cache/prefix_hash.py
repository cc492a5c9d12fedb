"""Tokens as arrays, common prefixes, and the chained hashes that name a prefix. No MLX.

A page is 64 tokens. Page hashes chain: the hash of a page covers everything before it, so equal
hashes mean equal prefixes up to a collision. They only name: the tree compares tokens, because
jumping by page hashes is slower (`bench.cache`). Names that leave the process (files, events,
routing), and what the eviction policy remembers by, are sha256.
"""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..errors import InvalidRequest

PAGE_TOKENS = 64
MAX_TOKEN = 2**32 - 1
NAME_DIGEST_BYTES = 16

Tokens: TypeAlias = NDArray[np.uint32]
TokenSource: TypeAlias = Sequence[int] | NDArray[Any]
Digest: TypeAlias = Callable[[bytes], bytes]

_FIRST_BLOCK = 256
_LAST_BLOCK = 1 << 16


class EntryName(NamedTuple):
    """The name of a token sequence outside the process: last full page, length, the rest.

    `page` is the chained sha256 at the last full page (the namespace's digest if there is none);
    `tail` is the sha256 of `page` and the tokens after it, empty where the length is a multiple of
    the page.
    """

    page: bytes
    length: int
    tail: bytes

    def __str__(self) -> str:
        text = f"{self.page[:NAME_DIGEST_BYTES].hex()}-{self.length}"
        return f"{text}-{self.tail[:NAME_DIGEST_BYTES].hex()}" if self.tail else text


def as_tokens(tokens: TokenSource) -> Tokens:
    """Token ids as a contiguous one-dimensional uint32 array; copies only what is not one already.

    Takes lists, tuples, ranges, other sequences of int, and whatever numpy reads as integers
    (`mx.array` too). Raises `InvalidRequest` for anything else, for negative ids, and for ids
    above 2**32 - 1.
    """
    if isinstance(tokens, np.ndarray):
        return _from_array(tokens)
    if isinstance(tokens, str | bytes | bytearray):
        raise InvalidRequest(f"tokens must be integers, got {type(tokens).__name__}")
    if isinstance(tokens, array) or not isinstance(tokens, Sequence):
        return _from_array(np.asarray(tokens))
    return _from_sequence(tokens)


def common_prefix_length(first: Tokens, second: Tokens) -> int:
    """Number of leading tokens in which two token arrays agree.

    Compares in blocks that grow, so that an early difference costs little and a late one runs at
    the speed of memory.
    """
    limit = min(len(first), len(second))
    start, block = 0, _FIRST_BLOCK
    while start < limit:
        stop = min(start + block, limit)
        differs = first[start:stop] != second[start:stop]
        at = int(differs.argmax())
        if differs[at]:
            return start + at
        start, block = stop, min(block * 8, _LAST_BLOCK)
    return limit


def page_hashes(
    tokens: Tokens, previous: bytes = b"", digest: Digest = xxhash.xxh3_128_digest
) -> list[bytes]:
    """The chained hash of each full page of `tokens`, which follow a page of hash `previous`."""
    hashes = []
    data = np.ascontiguousarray(tokens).tobytes()
    page_bytes = 4 * PAGE_TOKENS
    for at in range(0, len(data) - page_bytes + 1, page_bytes):
        previous = digest(previous + data[at : at + page_bytes])
        hashes.append(previous)
    return hashes


def sha256_digest(data: bytes) -> bytes:
    """The 32 bytes of sha256, in the shape `page_hashes` takes."""
    return hashlib.sha256(data).digest()


def namespace_digest(namespace: str) -> bytes:
    """What the names of a namespace's entries are chained from, where nothing better is given."""
    return sha256_digest(namespace.encode())


def entry_name(tokens: Tokens, digest: bytes, done: int = 0) -> EntryName:
    """The name of a sequence whose first `done` tokens (a multiple of the page) chain to `digest`.

    `tokens` are those after `done`; with the namespace's digest and `done` = 0 they are the whole
    sequence.
    """
    chain = page_hashes(tokens, digest, sha256_digest)
    page = chain[-1] if chain else digest
    rest = tokens[len(chain) * PAGE_TOKENS :]
    tail = sha256_digest(page + rest.tobytes()) if len(rest) else b""
    return EntryName(page, done + len(tokens), tail)


def _from_sequence(tokens: Sequence[int]) -> Tokens:
    try:
        return np.frombuffer(array("I", tokens), np.uint32)
    except OverflowError:
        worst = next(token for token in tokens if not 0 <= int(token) <= MAX_TOKEN)
        raise InvalidRequest(f"token {worst} is outside 0..{MAX_TOKEN}", "tokens") from None
    except TypeError as error:
        raise InvalidRequest(f"tokens must be integers: {error}") from None


def _from_array(tokens: NDArray[Any]) -> Tokens:
    if tokens.ndim != 1:
        raise InvalidRequest(f"tokens must have one dimension, got shape {tokens.shape}")
    if tokens.dtype == np.uint32:
        return np.ascontiguousarray(tokens)
    if not len(tokens):
        return np.empty(0, np.uint32)
    if tokens.dtype.kind not in "iu":
        raise InvalidRequest(f"tokens must be integers, got dtype {tokens.dtype}")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high > MAX_TOKEN:
        worst = low if low < 0 else high
        raise InvalidRequest(f"token {worst} is outside 0..{MAX_TOKEN}", "tokens")
    return tokens.astype(np.uint32)
