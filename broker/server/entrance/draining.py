"""The end of a server in order: no new work, what runs goes on for a while."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus

import anyio

from ..errors import RETRY_SECONDS, ApiError


class Draining:
    """Whether the server is about to end, and how much still runs. For the event loop's thread.

    `running` counts what is inside `work`: requests over HTTP, and turns over WebSocket. `cut`
    ends the turns among them; each still tells its client so.
    """

    def __init__(self, cut: Callable[[], object] = lambda: None) -> None:
        self.running = 0
        self.cut = cut
        self._leaving = 0
        self._started = anyio.Event()
        self._idle = anyio.Event()
        self._scopes: set[anyio.CancelScope] = set()

    @property
    def started(self) -> bool:
        """Whether new work is refused."""
        return self._started.is_set()

    def start(self) -> None:
        """Take no new work from here on. Safe to repeat."""
        self._started.set()
        self._note()

    def stop(self) -> None:
        """Cancel every connection's request, whatever it is at."""
        self.start()
        for scope in self._scopes:
            scope.cancel()

    async def wait(self) -> None:
        """Wait until the server is about to end."""
        await self._started.wait()

    async def wait_idle(self) -> None:
        """Wait until the server is about to end, no work runs any more, and all have left."""
        await self._idle.wait()

    def check(self) -> None:
        """Raise the `ApiError` that refuses new work, if the server is about to end."""
        if self.started:
            raise draining_error()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Count something that may go on for a while after `start`. Raises like `check`."""
        self.check()
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._note()

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Something idle or not that ends by itself after `start`, and is waited for."""
        self._leaving += 1
        try:
            yield
        finally:
            self._leaving -= 1
            self._note()

    @contextmanager
    def connected(self) -> Iterator[anyio.CancelScope]:
        """The scope of one request or WebSocket, which `stop` cancels."""
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                yield scope
            finally:
                self._scopes.discard(scope)

    def _note(self) -> None:
        if self.started and not self.running and not self._leaving:
            self._idle.set()


def draining_error() -> ApiError:
    """What is told to whoever wants something of a server that is about to end."""
    return ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "the server is about to end and takes no new work",
        type="server_error",
        code="draining",
        retry_after=RETRY_SECONDS,
    )
