"""What agents bring back."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, overload

from msgspec import Struct

from mlx_swarm.broker.request import FinishReason, TokenLogprob, Usage


class AgentResult(Struct, frozen=True, kw_only=True):
    """The end of one turn: its text, or the error it ended with, and its cost either way.

    `text` is what had been generated when an agent failed or was cancelled. `usage` of such a turn
    counts the prompt tokens as they were planned. `logprobs` has an item for each token generated
    if the swarm asks for them.
    """

    agent: str
    turn: int
    state: Literal["finished", "failed", "cancelled"]
    text: str
    usage: Usage
    finish_reason: FinishReason | None = None
    ttft_seconds: float | None = None
    error: Exception | None = None
    logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def value(self) -> str:
        """The text. Raises what ended the turn otherwise: `AgentCancelled`, or its error."""
        self.raise_error()
        return self.text

    def raise_error(self) -> None:
        """Raise what ended the turn, if it did not finish by itself."""
        if self.error is not None:
            raise self.error


class Results(Sequence[AgentResult]):
    """The results of a `map`, in the order of its tasks."""

    def __init__(self, results: Iterable[AgentResult]) -> None:
        self._results = tuple(results)

    def values(self) -> list[str]:
        """All texts. Raises an `ExceptionGroup` of the errors if any agent failed."""
        errors = [result.error for result in self._results if result.error is not None]
        if errors:
            raise ExceptionGroup(f"{len(errors)} of {len(self._results)} agents failed", errors)
        return [result.text for result in self._results]

    @property
    def failed(self) -> list[AgentResult]:
        """The results without a value."""
        return [result for result in self._results if result.error is not None]

    @property
    def usage(self) -> Usage:
        """The sum over all of them, failed ones included."""
        return sum((result.usage for result in self._results), Usage())

    @overload
    def __getitem__(self, index: int) -> AgentResult: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[AgentResult]: ...
    def __getitem__(self, index: int | slice) -> AgentResult | Sequence[AgentResult]:
        return self._results[index]

    def __len__(self) -> int:
        return len(self._results)

    def __iter__(self) -> Iterator[AgentResult]:
        return iter(self._results)
