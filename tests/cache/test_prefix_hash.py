"""Tokens, common prefixes, page hashes and names."""

import hashlib
from array import array
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_swarm.broker.cache.prefix_hash import (
    MAX_TOKEN,
    PAGE_TOKENS,
    as_tokens,
    common_prefix_length,
    entry_name,
    namespace_digest,
    page_hashes,
    sha256_digest,
)
from mlx_swarm.broker.errors import InvalidRequest

ids = st.lists(st.integers(0, MAX_TOKEN), max_size=300)
few = st.lists(st.integers(0, 1), max_size=2000)


@pytest.mark.parametrize(
    "source",
    [
        [1, 2, MAX_TOKEN],
        (1, 2, MAX_TOKEN),
        np.array([1, 2, MAX_TOKEN]),
        np.array([1, 0, 2, 0, MAX_TOKEN], np.uint32)[::2],
        [np.int64(1), np.uint32(2), np.uint64(MAX_TOKEN)],
        array("Q", [1, 2, MAX_TOKEN]),
        mx.array([1, 2, MAX_TOKEN], mx.uint32),
    ],
)
def test_integers_of_every_kind_become_the_same_array(source: Any) -> None:
    tokens = as_tokens(source)
    assert tokens.dtype == np.uint32
    assert tokens.flags.c_contiguous
    assert tokens.tolist() == [1, 2, MAX_TOKEN]


def test_a_token_array_is_not_copied() -> None:
    tokens = np.arange(10, dtype=np.uint32)
    assert as_tokens(tokens) is tokens


@pytest.mark.parametrize("source", [[], (), range(0), np.empty(0), mx.array([])])
def test_nothing_is_an_empty_array(source: Any) -> None:
    assert as_tokens(source).shape == (0,)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([1, -1], "token -1 is outside"),
        ([2**32], "token 4294967296 is outside"),
        ([2**70], "is outside"),
        (np.array([1, -7]), "token -7 is outside"),
        (np.array([2**32, 1]), "token 4294967296 is outside"),
        ([1.0], "must be integers"),
        ([None], "must be integers"),
        (["1"], "must be integers"),
        ("abc", "must be integers, got str"),
        (b"abc", "must be integers, got bytes"),
        (np.array([1.5]), "dtype float64"),
        (np.array([True]), "dtype bool"),
        (np.zeros((1, 2), np.uint32), r"shape \(1, 2\)"),
    ],
)
def test_what_is_no_token_is_refused_with_the_reason(source: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        as_tokens(source)


@given(ids)
def test_tokens_survive_the_conversion(tokens: list[int]) -> None:
    assert as_tokens(tokens).tolist() == tokens


@given(few, few, few)
def test_common_prefix_is_what_a_loop_finds(
    shared: list[int], first: list[int], second: list[int]
) -> None:
    one, other = shared + first, shared + second
    expected = next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    assert common_prefix_length(as_tokens(one), as_tokens(other)) == expected


@pytest.mark.parametrize("at", [0, 1, 255, 256, 2303, 2304, 100_000, 199_999])
def test_a_late_difference_is_found_exactly(at: int) -> None:
    tokens = np.arange(200_000, dtype=np.uint32)
    changed = tokens.copy()
    changed[at] += 1
    assert common_prefix_length(tokens, changed) == at


@given(ids, st.integers(0, 5))
def test_page_hashes_chain(tokens: list[int], cut: int) -> None:
    """Hashing in two parts, cut at a page, is hashing at once."""
    whole = page_hashes(as_tokens(tokens))
    assert len(whole) == len(tokens) // PAGE_TOKENS
    pages = min(cut, len(whole))
    rest = as_tokens(tokens[pages * PAGE_TOKENS :])
    previous = whole[pages - 1] if pages else b""
    assert whole[:pages] + page_hashes(rest, previous) == whole


def test_a_page_hash_covers_all_before_it() -> None:
    tokens = np.arange(4 * PAGE_TOKENS, dtype=np.uint32)
    changed = tokens.copy()
    changed[0] += 1
    assert not set(page_hashes(tokens)) & set(page_hashes(changed))


@given(st.lists(st.integers(0, MAX_TOKEN), max_size=200), st.integers(0, 3))
def test_a_name_does_not_depend_on_how_it_was_reached(tokens: list[int], pages: int) -> None:
    digest = namespace_digest("a")
    given_tokens = as_tokens(tokens)
    chain = page_hashes(given_tokens, digest, sha256_digest)
    done = min(pages, len(chain))
    reached = entry_name(
        given_tokens[done * PAGE_TOKENS :], chain[done - 1] if done else digest, done * PAGE_TOKENS
    )
    assert reached == entry_name(given_tokens, digest)
    assert reached.length == len(tokens)
    assert (reached.tail == b"") == (len(tokens) % PAGE_TOKENS == 0)


def test_names_are_plain_sha256_and_differ_by_namespace() -> None:
    page = np.arange(PAGE_TOKENS, dtype=np.uint32)
    digest = hashlib.sha256(b"model").digest()
    name = entry_name(np.append(page, np.uint32(9)), digest)
    expected = hashlib.sha256(digest + page.astype("<u4").tobytes()).digest()
    assert name.page == expected
    assert name.tail == hashlib.sha256(expected + (9).to_bytes(4, "little")).digest()
    assert str(name) == f"{expected[:16].hex()}-65-{name.tail[:16].hex()}"
    assert str(name) != str(entry_name(page, namespace_digest("other")))
