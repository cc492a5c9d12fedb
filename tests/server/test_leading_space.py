"""A continued text keeps the space that its first word begins with."""

import anyio
import pytest

from mlx_swarm.broker.models.chat_format import ChatFormat
from mlx_swarm.broker.server.turns.leading_space import LeadingSpace

WORDS = {1: b" Paris", 2: b"Paris", 3: b"\xe2", 4: b" "}


class _Tokens(ChatFormat):
    def __init__(self) -> None:
        pass

    def token_bytes(self, tokens: object) -> list[bytes]:
        assert isinstance(tokens, tuple)
        return [WORDS[token] for token in tokens]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([("Paris", (1,)), ("x", (2,))], " Parisx"),
        ([(" Paris", (1,)), ("x", (2,))], " Parisx"),
        ([("Paris", (2,)), ("x", (1,))], "Parisx"),
        ([("", (1,)), ("Paris", ())], " Paris"),
        ([("", (3,)), ("☕", (3, 3))], "☕"),
        ([("", (4,)), ("Paris", (2,))], " Paris"),
        ([("", ())], ""),
    ],
)
def test_the_space_is_put_back(pieces: list[tuple[str, tuple[int, ...]]], expected: str) -> None:
    async def joined() -> str:
        space = LeadingSpace(_Tokens())
        return "".join([await space.restored(text, tokens) for text, tokens in pieces])

    assert anyio.run(joined) == expected
