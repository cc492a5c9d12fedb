"""What the index tests share: a span that knows its tokens, a clock that is set, a slow oracle."""

from collections.abc import Sequence
from typing import NamedTuple

from mlx_swarm.broker.cache.node import Node, NodeState


class FakeSpan(NamedTuple):
    """Stands for the KV of `tokens` from absolute position `start`."""

    start: int
    tokens: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    def split(self, at: int) -> tuple["FakeSpan", "FakeSpan"]:
        cut = at - self.start
        assert 0 < cut < len(self.tokens)
        return FakeSpan(self.start, self.tokens[:cut]), FakeSpan(at, self.tokens[cut:])


def span_of(tokens: Sequence[int], start: int) -> FakeSpan:
    """The span of `tokens[start:]`."""
    return FakeSpan(start, tuple(tokens[start:]))


class ManualClock:
    """Seconds that pass when told to; `step` is added at each look."""

    def __init__(self, step: float = 0.0) -> None:
        self.now = 0.0
        self._step = step

    def __call__(self) -> float:
        self.now += self._step
        return self.now


class PrefixOracle:
    """Every stored prefix with its state, looked up by comparing with all of them."""

    def __init__(self) -> None:
        self.states: dict[tuple[int, ...], NodeState] = {}

    def put(self, tokens: Sequence[int], state: NodeState) -> None:
        """Store what is new of a sequence."""
        for length in range(1, len(tokens) + 1):
            self.states.setdefault(tuple(tokens[:length]), state)

    def drop(self, node: Node, tokens: Sequence[int]) -> None:
        """Forget the prefixes that end inside a node."""
        for length in range(node.start + 1, node.stop + 1):
            del self.states[tuple(tokens[:length])]

    def mark(self, node: Node, tokens: Sequence[int], state: NodeState) -> None:
        """Change the state of the prefixes that end inside a node."""
        for length in range(node.start + 1, node.stop + 1):
            self.states[tuple(tokens[:length])] = state

    def matched(self, tokens: Sequence[int]) -> int:
        """The longest common prefix with anything stored."""
        return max((_common(tokens, stored) for stored in self.states), default=0)

    def held(self, tokens: Sequence[int]) -> int:
        """The longest prefix that is resident from the start."""
        resident = [key for key, state in self.states.items() if state is NodeState.RESIDENT]
        return max((_common(tokens, stored) for stored in resident), default=0)

    def continuations(self, tokens: Sequence[int]) -> set[int]:
        """The tokens that are stored after a prefix."""
        given = tuple(tokens)
        return {key[-1] for key in self.states if key[:-1] == given}


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length
