"""Tokenizers built from metadata: round trips, special tokens, and SentencePiece as the judge."""

import io
import json
import unicodedata
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mlx_swarm.broker.errors import ModelUnreadable
from mlx_swarm.broker.models.tokenizer_building import (
    BYTE_SPECIALS,
    TokenizerFiles,
    byte_level,
    from_gguf,
    padded,
    size_of,
)
from tests.models.texts import TEXTS
from tests.models.tiny_gguf import MERGES, vocabulary


def built(files: TokenizerFiles) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(files.tokenizer))


def metadata(**changes: Any) -> dict[str, Any]:
    tokens = vocabulary()
    plain = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens.names,
        "token_type": tokens.kinds,
        "merges": list(MERGES),
        "eos_token_id": 2,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in {**plain, **changes}.items()}


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "default", "llama-bpe", "qwen2"])
def test_byte_level_bpe_round_trips(pre: str) -> None:
    tokenizer = built(from_gguf(metadata(pre=pre)))
    for text in TEXTS:
        encoded = tokenizer.encode(text, add_special_tokens=False).ids
        composed = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        assert tokenizer.decode(encoded, skip_special_tokens=False) == composed


@given(st.text())
def test_the_tokenizer_made_in_code_round_trips_byte_by_byte(text: str) -> None:
    encoded = BYTES.encode(text, add_special_tokens=False).ids
    assert BYTES.decode(encoded, skip_special_tokens=False) == text
    assert len(encoded) == len(text.encode()) or any(name in text for name in BYTE_SPECIALS)


def test_special_tokens_are_one_id_each() -> None:
    for tokenizer in (BYTES, built(from_gguf(metadata()))):
        ids = [tokenizer.encode(name).ids for name in BYTE_SPECIALS]
        assert ids == [[0], [1], [2]]
        assert tokenizer.encode("<|im_start|>the").ids[0] == 1


def test_merges_apply_within_words_only() -> None:
    tokenizer = built(from_gguf(metadata()))
    assert tokenizer.encode("the the").tokens == ["the", "Ġthe"]
    assert tokenizer.encode("12").tokens == ["1", "2"]


def test_padding_names_every_id_and_changes_no_text() -> None:
    files = padded(byte_level(), 1000)
    assert size_of(files) == 1000
    tokenizer = built(files)
    assert tokenizer.decode([999]) == "<unused_999>"
    assert tokenizer.encode("<unused_999>").ids == BYTES.encode("<unused_999>").ids


def test_a_first_token_is_prepended_where_the_metadata_say_so() -> None:
    tokenizer = built(from_gguf(metadata(add_bos_token=True, bos_token_id=0)))
    assert tokenizer.encode("a").ids[0] == 0
    assert tokenizer.encode("a", add_special_tokens=False).ids[0] != 0


def test_the_configuration_names_stop_token_and_template() -> None:
    described = {**metadata(), "tokenizer.chat_template": "{{ messages }}"}
    config = from_gguf(described).config
    assert config["eos_token"] == "<|im_end|>"
    assert config["chat_template"] == "{{ messages }}"
    assert "bos_token" not in config


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": None}, "no tokenizer"),
        ({"model": "bert"}, "'bert'; supported are gpt2, llama"),
        ({"pre": "exotic"}, "'exotic', which is not supported"),
        ({"merges": ["one"]}, "not two tokens"),
        ({"merges": ["no such"]}, "tokenizer is broken"),
        ({"add_bos_token": True}, "first token"),
        ({"model": "llama"}, "no score"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelUnreadable, match=said):
        from_gguf(metadata(**changes))


def test_sentencepiece_vocabularies_encode_as_sentencepiece_does() -> None:
    processor = _trained()
    pieces = range(processor.get_piece_size())
    kinds = [_kind(processor, index) for index in pieces]
    files = from_gguf(
        metadata(
            model="llama",
            tokens=[processor.id_to_piece(i) for i in pieces],
            scores=[processor.get_score(i) for i in pieces],
            token_type=kinds,
            bos_token_id=processor.bos_id(),
            eos_token_id=processor.eos_id(),
        )
    )
    tokenizer = built(files)
    for text in TEXTS:
        if text:  # an empty text is no token there, and the mark of its start here
            assert tokenizer.encode(text, add_special_tokens=False).ids == processor.encode(text)
            assert tokenizer.encode(text).ids[0] == processor.bos_id()


def _kind(processor: sentencepiece.SentencePieceProcessor, index: int) -> int:
    checks = {2: processor.is_unknown, 3: processor.is_control, 6: processor.is_byte}
    return next((kind for kind, check in checks.items() if check(index)), 1)


def _trained() -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 20),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


BYTES = built(byte_level())
