"""Threads that run calls one after the other, and that a disk which hangs cannot make wait for."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Threads:
    """So many threads; unlike those of an executor they do not keep a process from ending."""

    def __init__(self, count: int, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        function: Callable[Arguments, Result],
        *given: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Future[Result]:
        """Have one of the threads call a function. Raises `RuntimeError` after `close`."""
        outcome: Future[Result] = Future()

        def call() -> None:
            try:
                result = function(*given, **named)
            except BaseException as error:
                outcome.set_exception(error)
            else:
                outcome.set_result(result)

        with self._lock:
            if self._is_closed:
                raise RuntimeError("these threads have ended")
            self._calls.put(call)
        return outcome

    def close(self, timeout: float) -> bool:
        """End the threads after what was submitted; whether that took at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        with self._lock:
            self._is_closed = True
            for _ in self._threads:
                self._calls.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            if call is None:
                return
            call()
            # Waiting for the next one it must not keep alive what this one returned.
            del call
