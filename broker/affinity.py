"""The rule that one thread owns MLX, as an assertion at every entry point."""

import threading


class ThreadGuard:
    """Belongs to the first thread that checks it; any other thread fails the assertion.

    MLX streams live in a thread: arrays made in one and evaluated in another fail late and
    obscurely.
    """

    __slots__ = ("_owner",)

    def __init__(self) -> None:
        self._owner: int | None = None

    def check(self) -> None:
        """Assert that the calling thread is the owner; the first call makes it so."""
        ident = threading.get_ident()
        if self._owner is None:
            self._owner = ident
        assert self._owner == ident, (
            f"MLX is owned by thread {self._owner}, called from thread {ident}"
        )
