"""What `take` hands out: a clone of a donor's first tokens, and the pins that keep it alive."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


class PromptLease:
    """A clone at offset `length`, and its pins. A context manager; releasing twice is harmless.

    `tokens` are the `length` tokens whose KV the clone holds; `caches` is one cache object a layer.
    Running a model on them never changes the donor. `ram_tokens` and `cold_tokens` say where they
    came from and add up to `length`.
    """

    def __init__(
        self,
        tokens: NDArray[np.uint32],
        caches: list[Any],
        *,
        namespace: str,
        cold_tokens: int,
        on_release: Callable[["PromptLease"], None],
    ) -> None:
        self.tokens = tokens
        self.caches = caches
        self.namespace = namespace
        self.cold_tokens = cold_tokens
        self._on_release: Callable[[PromptLease], None] | None = on_release

    @property
    def length(self) -> int:
        """Tokens whose KV the clone holds."""
        return len(self.tokens)

    @property
    def ram_tokens(self) -> int:
        """Tokens of it that were in RAM when it was taken."""
        return self.length - self.cold_tokens

    @property
    def released(self) -> bool:
        """Whether the pins are gone."""
        return self._on_release is None

    def release(self) -> None:
        """Give the pins back and drop the clone's caches. Only the first call does something."""
        hook, self._on_release = self._on_release, None
        if hook is not None:
            self.caches = []
            hook(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
