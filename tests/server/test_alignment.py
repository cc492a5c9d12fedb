"""One prompt of two tokenizations: what it says never changes, and as much as can be is kept."""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mlx_swarm.broker.models import load
from mlx_swarm.broker.models.tokenizer_building import from_gguf
from mlx_swarm.broker.server.turns.alignment import Ids, align

SMOLLM2 = "synthetic:llama?layers=1&hidden=32&heads=2&tokenizer=smollm2-135m"
BYTES = "synthetic:llama?layers=1&hidden=32&heads=2"
MARKS = ("<|im_start|>", "<|im_end|>")

WORDS = ("the", " cat", "s", " sat", "é", "€", "🙂", "\ufffd", "\n", "  ", "<", "|", "im", "1234")
plain = st.lists(st.sampled_from(WORDS[:-4]), max_size=12).map("".join)
texts = st.lists(st.sampled_from([*WORDS, *MARKS]), max_size=12).map("".join)


class Text:
    """A real tokenizer, with other ways to write the same."""

    def __init__(self, model: str) -> None:
        self.tokenizer: Any = load(model).tokenizer
        self.special = frozenset(self.encode("".join(MARKS)).tolist())

    def encode(self, text: str) -> Ids:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False), np.int32)

    def decode(self, tokens: Sequence[int] | Ids) -> str:
        return str(self.tokenizer.decode(list(map(int, tokens)), skip_special_tokens=False))

    def cut(self, text: str, places: Sequence[int]) -> Ids:
        """The text as the tokens of its pieces."""
        ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
        pieces = [self.encode(text[a:b]) for a, b in pairwise(ends)]
        return np.concatenate([np.empty(0, np.int32), *pieces]).astype(np.int32)


class SentencePiece(Text):
    """One that marks spaces, drops the first one of a text, and falls back on bytes."""

    def __init__(self) -> None:
        pieces = ["\u2581", *"thecasx<|>_", "th", "the", "at", "\u2581c", "\u2581cat", "\u2581s"]
        tokens = ["<unk>", *MARKS, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
        kinds = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
        files = from_gguf(
            {
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.tokens": tokens,
                "tokenizer.ggml.token_type": kinds,
                "tokenizer.ggml.scores": [float(at) for at in range(len(tokens))],
                "tokenizer.ggml.add_bos_token": False,
            }
        )
        self.tokenizer = Tokenizer.from_str(json.dumps(files.tokenizer))
        self.special = frozenset({1, 2})

    def encode(self, text: str) -> Ids:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)


@pytest.fixture(scope="module", params=[SMOLLM2, BYTES])
def text(request: pytest.FixtureRequest) -> Text:
    return Text(request.param)


@pytest.fixture(scope="module", params=[SMOLLM2, BYTES, "pieces"])
def any_text(request: pytest.FixtureRequest) -> Text:
    return SentencePiece() if request.param == "pieces" else Text(request.param)


@pytest.fixture(scope="module")
def words() -> Text:
    return Text(SMOLLM2)


def joined(text: Text, kept: Ids, rendered: Ids) -> tuple[list[int], int]:
    alignment = align(kept, rendered, text.decode, text.special)
    return alignment.joined(kept, rendered).tolist(), alignment.kept


@settings(max_examples=60, deadline=None)
@given(
    before=texts,
    said=texts,
    after=texts,
    wanted=texts,
    cuts=st.lists(st.integers(0, 60), max_size=6),
    junk=st.lists(st.integers(0, 258), max_size=4),
)
def test_what_a_prompt_says_never_changes(
    any_text: Text,
    before: str,
    said: str,
    after: str,
    wanted: str,
    cuts: list[int],
    junk: list[int],
) -> None:
    text = any_text
    kept = np.concatenate([text.cut(before + said, cuts), np.array(junk, np.int32)])
    for said_again in (before + said + after, before + after, before + wanted, wanted):
        rendered = text.encode(said_again)
        tokens, length = joined(text, kept, rendered)
        assert text.decode(tokens) == text.decode(rendered)
        assert tokens[:length] == kept[:length].tolist()


@settings(max_examples=30, deadline=None)
@given(said=plain, after=texts, cuts=st.lists(st.integers(0, 60), max_size=6))
def test_all_is_kept_of_what_ends_with_a_special_token(
    text: Text, said: str, after: str, cuts: list[int]
) -> None:
    kept = np.concatenate([text.cut(said, cuts), text.encode("<|im_end|>")])
    assert text.decode(kept) == f"{said}<|im_end|>"
    _, length = joined(text, kept, text.encode(f"{said}<|im_end|>{after}"))
    assert length == len(kept)


def test_a_reply_in_other_tokens_is_kept_with_what_follows(words: Text) -> None:
    kept = np.concatenate([words.encode(each) for each in ("<|im_start|>hel", "lo wor", "ld")])
    rendered = words.encode("<|im_start|>hello world<|im_end|>\n")
    assert kept[:2].tolist() != rendered[:2].tolist()
    tokens, length = joined(words, kept, rendered)
    assert length == len(kept)
    assert tokens == [*kept.tolist(), *words.encode("<|im_end|>\n").tolist()]


@pytest.mark.parametrize(("stop", "kept_words"), [(" sat", 3), ("at", 3), (" cat", 2)])
def test_what_was_written_beyond_the_message_is_cut_off(
    words: Text, stop: str, kept_words: int
) -> None:
    pieces = [words.encode(each) for each in ("<|im_start|>", "the", " cat", " sat", " down")]
    kept = np.concatenate(pieces)
    message = "the cat sat down"
    at = message.find(stop) if stop != "at" else message.find("at", 6)
    rendered = words.encode(f"<|im_start|>{message[:at]}<|im_end|>")
    tokens, length = joined(words, kept, rendered)
    assert length == sum(map(len, pieces[:kept_words]))
    assert words.decode(tokens) == words.decode(rendered)


def test_halves_of_a_character_do_not_make_up_another_one(any_text: Text) -> None:
    text = any_text
    euro = text.encode("€")
    for length in range(1, len(euro)):
        kept = np.concatenate([text.encode("<|im_start|>a"), euro[:length]])
        rendered = text.encode("<|im_start|>a\ufffdb<|im_end|>")
        tokens, _ = joined(text, kept, rendered)
        assert text.decode(tokens) == text.decode(rendered)


def test_only_what_differs_is_decoded(text: Text) -> None:
    turns = [text.encode(f"<|im_start|>turn {number}<|im_end|>") for number in range(50)]
    decoded: list[int] = []

    def watched(tokens: Ids) -> str:
        decoded.append(len(tokens))
        return text.decode(tokens)

    decode: Callable[[Ids], str] = watched
    alignment = align(
        np.concatenate(turns), np.concatenate([*turns, turns[0]]), decode, text.special
    )
    assert alignment.kept == sum(map(len, turns))
    assert not decoded


def test_lengths_move_with_the_tokens(words: Text) -> None:
    system, rest = words.encode("<|im_start|>rules<|im_end|>"), words.encode("<|im_end|>more")
    kept = np.concatenate([system, words.cut("hello world", [3]), rest[:1]])
    rendered = np.concatenate([system, words.encode("hello world"), rest])
    alignment = align(kept, rendered, words.decode, words.special)
    marks = (len(system), len(rendered) - len(rest) + 1, len(rendered))
    more = len(rest) - 1
    assert list(alignment.moved(marks)) == [len(system), len(kept), len(kept) + more]
