"""The one thread that owns MLX: commands go in, results come out. No MLX import here."""

import threading
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Generic, NamedTuple, Protocol, TypeVar

import anyio

from ..errors import BrokerClosed
from .mailbox import Courier, LoopGone, Reply

Result = TypeVar("Result")

REST_SECONDS = 60.0
"""So long a thread without work sleeps at most before its worker gets a turn."""


class Worker(Protocol):
    """What the thread runs. Made, used and closed in the thread alone."""

    def turn(self) -> bool:
        """Do a bounded piece of work; False if there is nothing to do until the next command, or
        for `REST_SECONDS`.
        """

    def patience(self) -> float:
        """Seconds after which there may be something to do without a command."""

    def close(self) -> None:
        """Fail what is open and give everything back."""


WorkerType = TypeVar("WorkerType", bound=Worker)


class _Command(NamedTuple, Generic[WorkerType]):
    run: Callable[[WorkerType], None]
    abandon: Callable[[BaseException], None]


class EngineThread(Generic[WorkerType]):
    """Runs one `Worker` in a thread of its own, from `start` to `aclose`.

    Commands run between two turns, in the order in which they came. The thread never waits for the
    event loop and the loop never waits for the thread, except in `await`. Where the loop has ended
    without closing it, the thread ends itself.
    """

    def __init__(
        self, open_worker: Callable[[], WorkerType], name: str = "mlx-swarm-engine"
    ) -> None:
        self._open_worker = open_worker
        self._commands: SimpleQueue[_Command[WorkerType] | None] = SimpleQueue()
        self._courier = Courier()
        # Reentrant, because a finaliser may post while its own thread is in here.
        self._lock = threading.RLock()
        self._accepting = False
        self.stopping = False
        self._opened: Reply[None] = Reply(self._courier)
        self._exited: Reply[None] = Reply(self._courier)
        # A daemon, so that a loop that died without closing the broker does not keep the process.
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    @property
    def courier(self) -> Courier:
        """The way to the event loop that the thread was made in."""
        return self._courier

    async def start(self) -> None:
        """Start the thread and wait until its worker is open; raises what opening it raised."""
        self._accepting = True
        self._thread.start()
        try:
            await self._opened.wait()
        except BaseException:
            await self.aclose()
            raise

    def post(
        self,
        run: Callable[[WorkerType], None],
        abandon: Callable[[BaseException], None],
    ) -> None:
        """Run a command in the thread; `abandon` is called instead if the thread ends before it.

        Raises `BrokerClosed` if the thread takes no more commands.
        """
        with self._lock:
            if not self._accepting:
                raise BrokerClosed("the broker is closed")
            self._commands.put(_Command(run, abandon))

    def post_from_finaliser(self, run: Callable[[WorkerType], None]) -> None:
        """Like `post`, but takes no lock and is dropped if the thread has ended."""
        self._commands.put(_Command(run, _ignore))

    async def call(self, function: Callable[[WorkerType], Result]) -> Result:
        """The result of `function(worker)`, computed in the thread; raises what it raises."""
        reply: Reply[Result] = Reply(self._courier)

        def run(worker: WorkerType) -> None:
            try:
                reply.set(function(worker))
            except Exception as error:
                reply.fail(error)

        self.post(run, reply.fail)
        return await reply.wait()

    async def aclose(self) -> None:
        """End the thread after its current turn and join it; what is open fails as closed.

        Not interrupted by cancellation: the thread is gone when this returns. Safe to repeat.
        """
        self.stopping = True
        if self._thread.ident is None:
            return
        self._commands.put(None)
        with anyio.CancelScope(shield=True):
            await self._exited.wait()
            self._thread.join()
            await _left_system(self._thread)

    def _main(self) -> None:
        try:
            self._serve()
        except LoopGone:
            pass
        finally:
            self._leave()

    def _serve(self) -> None:
        try:
            worker = self._open_worker()
        except BaseException as error:
            self._opened.fail(error)
            return
        try:
            self._opened.set(None)
            self._courier.flush()
            busy = False
            while self._run_commands(worker, wait=not busy):
                # Replies do not wait for the turn.
                self._courier.flush()
                busy = worker.turn()
                self._courier.flush()
        finally:
            worker.close()

    def _run_commands(self, worker: WorkerType, wait: bool) -> bool:
        """Run what has come in, waiting for the first if there is nothing else to do."""
        while not self.stopping:
            if not wait and self._commands.empty():
                return True
            try:
                command = self._commands.get(timeout=min(worker.patience(), REST_SECONDS))
            except Empty:
                return True
            if command is not None:
                command.run(worker)
            wait = False
        return False

    def _leave(self) -> None:
        with self._lock:
            self._accepting = False
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command.abandon(BrokerClosed("the broker was closed"))
        self._exited.set(None)
        try:
            self._courier.flush()
        except LoopGone:
            pass


async def _left_system(thread: threading.Thread) -> None:
    """Wait until a joined thread is gone for Linux too; elsewhere there is no need to.

    MLX frees Python objects in destructors that run after the join. If the interpreter is ending
    by then, CPython ends the thread in the middle of C++ code, which aborts the process.
    """
    task = Path(f"/proc/self/task/{thread.native_id}")
    while task.exists():  # noqa: ASYNC110, ASYNC240 - nothing else can tell, and it is no disk
        await anyio.sleep(0.001)


def _ignore(error: BaseException) -> None:
    """Nobody waits for a command of a finaliser."""
