"""Bytes of single tokens, against what whole texts are made of."""

import pytest

from mlx_swarm.broker.models import load
from tests.tiny_broker import TINY


@pytest.mark.parametrize("text", ["plain words", "naïve ☕ 𝄞", " \n\t"])
def test_the_bytes_of_all_tokens_are_the_text(text: str) -> None:
    model = load(TINY)
    assert b"".join(model.chat.token_bytes(model.encode(text))) == text.encode()


def test_padding_has_none() -> None:
    model = load(TINY)
    assert model.chat.token_bytes([0, 10**6]) == [model.chat.token_bytes([0])[0], b""]
    assert model.chat.token_bytes([]) == []
