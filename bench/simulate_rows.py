"""The rows of a simulated lane, and what their attention reads in a step."""

from collections.abc import Callable
from typing import Any

from mlx_swarm.broker.cache.lease import PromptLease
from mlx_swarm.broker.cache.prefix_hash import Tokens
from mlx_swarm.broker.cache.prompt_cache import PromptCache
from mlx_swarm.broker.engine.row import Row
from mlx_swarm.broker.errors import SwarmError
from mlx_swarm.broker.request import Completed, Request, RequestId, StreamEvent


class SimulatedRow(Row):
    """A request whose output is known beforehand: `answer`, of which it gets every token.

    `reach` is how much it reads where the cache holds it, `computed` counts the prompt tokens that
    were computed for it, each once. `on_end` is told of its end, and of what went wrong.
    """

    def __init__(
        self, name: str, request: Request, prompt: Tokens, answer: Tokens, submitted: float
    ) -> None:
        nothing: Any = None
        reader: Any = _Reader(self)
        text: Any = _NoText()
        super().__init__(
            RequestId(name),
            request,
            reader,
            prompt=prompt,
            boundaries=tuple(request.boundaries),
            namespace=request.tenant,
            max_tokens=len(answer),
            sampler=None,
            text=text,
            submitted=submitted,
            lane=nothing,
        )
        self.answer: list[int] = answer.tolist()
        self.on_end: Callable[[SimulatedRow, SwarmError | None], None] = lambda row, error: None
        self.reach = 0
        self.computed = 0
        self.first_step = 0

    @property
    def given(self) -> int:
        """Tokens of its answer that it had when it was last preempted."""
        return len(self.sequence) - len(self.prompt)

    @property
    def shared(self) -> list[tuple[int, int]]:
        """What it reads where the cache holds it: extents, and how many tokens of each."""
        ranges = self.lease.ranges if self.lease is not None else ()
        ends = [(id(each.extent), each.start, min(each.stop, self.reach)) for each in ranges]
        return [(extent, stop - start) for extent, start, stop in ends if start < stop]

    def advance(self, stop: int) -> None:
        """Its tokens up to `stop` were computed. Those of a time before are counted there."""
        fresh = min(stop, len(self.prompt)) - max(self.position, self.reached)
        self.computed += max(0, fresh)
        self.position = stop


class _Reader:
    """A row's mailbox: only its end is of interest."""

    def __init__(self, row: SimulatedRow) -> None:
        self._row = row

    def put(self, event: StreamEvent) -> None:
        if isinstance(event, Completed):
            self._row.on_end(self._row, None)

    def fail(self, error: SwarmError) -> None:
        self._row.on_end(self._row, error)


class _NoText:
    """Text of tokens that are nobody's words."""

    stopped = False
    text = ""

    def add(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


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
        """A row takes part, which has so many outputs."""
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


def exchange(
    cache: PromptCache, row: Row, length: int, accept: Callable[[PromptLease], bool]
) -> bool:
    """Lease the first `length` tokens of a row instead of what is leased, if `accept` says so."""
    lease = cache.renew(row.sequence[: length + 1], row.namespace)
    if lease is None:
        return False
    accepted = accept(lease)
    unused = row.lease if accepted else lease
    if accepted:
        row.lease = lease
    if unused is not None:
        unused.release()
    return accepted
