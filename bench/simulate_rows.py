"""The rows of a simulated lane, and what their attention reads in a step."""

from typing import Any

from mlx_swarm.broker.cache.prefix_hash import Tokens
from mlx_swarm.broker.engine.row import Row
from mlx_swarm.broker.request import Request, RequestId


class SimulatedRow(Row):
    """A request whose output is known beforehand: `answer`, of which it gets every token.

    `reach` is how much it reads where the cache holds it, `computed` counts the prompt tokens that
    were computed for it.
    """

    def __init__(
        self, name: str, request: Request, prompt: Tokens, answer: Tokens, submitted: float
    ) -> None:
        nothing: Any = None
        super().__init__(
            RequestId(name),
            request,
            nothing,
            prompt=prompt,
            boundaries=tuple(request.boundaries),
            namespace=request.tenant,
            max_tokens=len(answer),
            sampler=None,
            text=nothing,
            submitted=submitted,
        )
        self.answer = answer
        self.reach = 0
        self.computed = 0
        self.first_step = 0

    @property
    def shared(self) -> list[tuple[int, int]]:
        """What it reads where the cache holds it: extents, and how many tokens of each."""
        ranges = self.lease.ranges if self.lease is not None else ()
        ends = [(id(each.extent), each.start, min(each.stop, self.reach)) for each in ranges]
        return [(extent, stop - start) for extent, start, stop in ends if start < stop]


class Reading:
    """What the attention of a step reads: the rows' own tokens, those of shared extents, each
    counted once, and the same counted for every reader.
    """

    def __init__(self) -> None:
        self.own = self.once = self.read = 0
        self._readers: dict[int, tuple[int, int]] = {}

    @property
    def totals(self) -> tuple[int, int, int]:
        """All three."""
        return self.own, self.once, self.read

    def join(self, row: SimulatedRow, outputs: int) -> None:
        """A row takes part."""
        self.own += len(row.prompt) + outputs - row.reach
        self.read += row.reach
        for extent, tokens in row.shared:
            readers, counted = self._readers.get(extent, (0, tokens))
            self.once += 0 if readers else counted
            self._readers[extent] = readers + 1, counted

    def leave(self, row: SimulatedRow, outputs: int) -> None:
        """A row takes part no more; it reads what it did when it joined."""
        self.own -= len(row.prompt) + outputs - row.reach
        self.read -= row.reach
        for extent, _ in row.shared:
            readers, counted = self._readers.pop(extent)
            if readers > 1:
                self._readers[extent] = readers - 1, counted
            else:
                self.once -= counted
