"""How many bytes sequences take together where what they have in common is held once. No MLX."""

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple, Self

import numpy as np

from ..cache.prefix_hash import Tokens, common_prefix_length

ORDERED = np.dtype(">u4")
"""Written so, sequences sort as bytes where they would sort as tokens."""


class Trail(NamedTuple):
    """A sequence of a namespace, and `more` tokens that are still to come after it. A token's KV
    takes `per_token` bytes, and what cannot be shared `fixed` besides.
    """

    namespace: str
    key: bytes
    more: int
    per_token: int
    fixed: int

    @classmethod
    def of(
        cls, namespace: str, tokens: Tokens, more: int, per_token: int = 1, fixed: int = 0
    ) -> Self:
        """The trail of some tokens."""
        return cls(namespace, tokens.astype(ORDERED).tobytes(), more, per_token, fixed)

    @property
    def tokens(self) -> Tokens:
        """The tokens that are there."""
        return np.frombuffer(self.key, ORDERED).astype(np.uint32)

    def __len__(self) -> int:
        return len(self.key) // ORDERED.itemsize

    @property
    def prompt_bytes(self) -> int:
        """Bytes of the tokens that are there, with nothing shared."""
        return self.fixed + self.per_token * len(self)

    def bytes_beyond(self, shared: int) -> int:
        """Bytes of all but the first `shared` tokens."""
        return self.fixed + self.per_token * (len(self) - shared + self.more)


class Footprints:
    """Trails, sorted: what one shares with any other it shares with a neighbour."""

    def __init__(self, trails: Iterable[Trail] = ()) -> None:
        self.total = 0
        self._trails: list[Trail] = []
        for trail in trails:
            self.add(trail)

    def __len__(self) -> int:
        return len(self._trails)

    def copy(self) -> "Footprints":
        """Another one with the same trails."""
        other = Footprints()
        other.total, other._trails = self.total, list(self._trails)
        return other

    def shared(self, trail: Trail) -> int:
        """Tokens at the beginning of a trail that others have as well."""
        at = bisect_left(self._trails, trail)
        return max(
            (_common(trail, each) for each in self._trails[max(at - 1, 0) : at + 1]), default=0
        )

    def adds(self, trail: Trail) -> int:
        """Bytes that a trail would add."""
        return trail.bytes_beyond(self.shared(trail))

    def add(self, trail: Trail) -> None:
        """Count a trail; the same one twice is two."""
        self.total += self.adds(trail)
        insort(self._trails, trail)

    def remove(self, trail: Trail) -> None:
        """Count a trail, which is there, no more."""
        del self._trails[bisect_left(self._trails, trail)]
        self.total -= self.adds(trail)

    def check_integrity(self, trails: Iterable[Trail]) -> None:
        """Assert that these are the trails, and that the total is theirs."""
        expected = sorted(trails)
        assert self._trails == expected
        assert self.total == Footprints(expected).total


def _common(first: Trail, second: Trail) -> int:
    if first.namespace != second.namespace:
        return 0
    return common_prefix_length(
        np.frombuffer(first.key, np.uint32), np.frombuffer(second.key, np.uint32)
    )
