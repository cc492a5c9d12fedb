"""The broker: the async facade over the engine thread. Works on asyncio and trio."""

import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

from anyio import to_thread
from msgspec import Struct

from .backend import describe, require_mlx
from .checks import check_range, check_text
from .engine.mailbox import Mailbox
from .engine.submission import MAX_QUEUE, Submission
from .engine.thread import EngineThread
from .errors import BrokerClosed, EngineFailed, InvalidSetting, ModelUnreadable, SwarmError
from .request import Completed, Message, Request, RequestId, StreamEvent, check_messages
from .trace.recorder import Recorder, RecorderStatistics

if TYPE_CHECKING:
    from .cache.cold import Flushed
    from .engine.loop import EngineLoop
    from .engine.settings import EngineStatistics
    from .models import LoadedModel, Progress, Rendered

CLOSED_IN_LOADING = "the broker was closed while its model was loading"
MOST_FLUSH_SECONDS = 86_400.0
SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
SIZE_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class BrokerStatistics(Struct, frozen=True, kw_only=True):
    """What is going on and what it has cost: requests and prompt cache, and the trace."""

    engine: "EngineStatistics"
    trace: RecorderStatistics


class Broker:
    """Serves many agents from one model and one prompt cache.

    `model` is what `mlx_swarm.broker.models.load` takes. `ram` bounds the prompt cache, in bytes
    or as text ("2GiB", "512MB"); `memory` bounds weights, cache and running requests together
    (default: what the device has), and requests wait for it in their order. `cold` is a folder in
    which prompts are kept beyond RAM and restarts, in files of at most `cold_limit` together. With
    `wired` Metal keeps in memory as much as it recommends, for models that take most of it; a Mac
    may panic then (ml-explore/mlx#3186).

    At most `max_rows` requests run at a time and `max_queue` more wait for their turn, or for their
    next one, where others have taken their place (see `Request`); further ones end with
    `QueueFull`. Between two decode steps at most `prefill_chunk` prompt tokens are computed
    (default: as many as let running requests wait for 3.5 steps at most, by what was measured;
    while nothing decodes, half a second's worth). `trace` is a file for the trace events;
    `progress` is called, in the engine thread, while the model loads.

    An async context manager: entering loads the model, leaving ends everything, also what is still
    being streamed. Raises `InvalidSetting`, and `BackendMissing` where MLX is not installed.
    """

    def __init__(
        self,
        model: str,
        *,
        ram: int | str = "2GiB",
        memory: int | str | None = None,
        cold: str | os.PathLike[str] | None = None,
        cold_limit: int | str = "20GiB",
        dtype: str | None = None,
        wired: bool = False,
        max_rows: int = 32,
        max_queue: int = MAX_QUEUE,
        prefill_chunk: int | None = None,
        trace: str | os.PathLike[str] | None = None,
        progress: "Callable[[Progress], None] | None" = None,
    ) -> None:
        self._ram = parse_size(ram)
        self._memory = 0 if memory is None else parse_size(memory)
        self._cold = None if cold is None else _folder(cold)
        self._cold_bytes = parse_size(cold_limit)
        counts = {"max_rows": max_rows, "max_queue": max_queue}
        if prefill_chunk is not None:
            counts["prefill_chunk"] = prefill_chunk
        for name, value in counts.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidSetting(f"{name} is {value!r}; it must be at least 1, and whole")
        require_mlx()
        self._model = model
        self._dtype = dtype
        self._wired = wired
        self._max_rows = max_rows
        self._max_queue = max_queue
        self._prefill_chunk = prefill_chunk
        self._trace = trace
        self._progress = progress
        self._ids = itertools.count(1)
        self._thread: EngineThread[EngineLoop] | None = None
        self._opening: EngineThread[EngineLoop] | None = None
        self._text: LoadedModel | None = None
        self.model_name = str(model)
        self.context_length = 0
        self.recorder: Recorder

    def stream(self, request: Request) -> "ResponseStream":
        """Start a request and iterate over its events: `Started`, `Delta`s, `Completed`.

        Raises `InvalidRequest` for what can be seen without the model. What takes the model to see
        (`ContextOverflow` above all), and `QueueFull`, is raised by the iteration, before anything
        has changed.
        """
        request.validate()
        thread = self._running()
        request_id = RequestId(f"request-{next(self._ids)}")
        mailbox = Mailbox(thread.courier)
        submission = Submission(request_id, request, mailbox, self.recorder.now())
        thread.post(lambda engine: engine.submit(submission), mailbox.fail)
        return ResponseStream(request_id, mailbox, thread)

    async def complete(self, request: Request) -> Completed:
        """Run a request to its end. Cancelling the caller cancels the request."""
        async with self.stream(request) as events:
            async for event in events:
                if isinstance(event, Completed):
                    return event
        raise EngineFailed("a request ended without saying how")

    async def render(self, messages: Sequence[Message]) -> "Rendered":
        """Messages as the model's chat template puts them, ready for a reply."""
        check_messages(messages)
        return await to_thread.run_sync(self._loaded().render, messages)

    async def encode(self, text: str) -> list[int]:
        """Text as tokens."""
        check_text("text", text)
        return await to_thread.run_sync(self._loaded().encode, text)

    async def statistics(self) -> BrokerStatistics:
        """What is going on now, and what it has cost since the start."""
        engine = await self._running().call(lambda engine: engine.statistics())
        return BrokerStatistics(engine=engine, trace=self.recorder.statistics())

    async def flush(self, seconds: float = 30.0) -> "Flushed":
        """Write what only RAM has to the cold tier, so that it survives a crash.

        Waits for at most so many seconds, in which no request goes on. Returns what is left to
        write, not what was written: `Flushed(writes=0, bytes=0)` if all of it is on disk.
        Raises `InvalidRequest` for what is no number of seconds.
        """
        check_range("seconds", seconds, 0, MOST_FLUSH_SECONDS)
        return await self._running().call(lambda engine: engine.flush(seconds))

    async def aclose(self) -> None:
        """End everything; open requests fail with `BrokerClosed`. Safe to repeat."""
        thread, self._thread, self._text = self._thread or self._opening, None, None
        if thread is not None:
            await thread.aclose()

    async def __aenter__(self) -> Self:
        if self._thread is not None or self._opening is not None:
            raise InvalidSetting("this broker is open already")
        thread: EngineThread[EngineLoop] = EngineThread(lambda: self._open(thread))
        self._opening = thread
        try:
            await thread.start()
            if thread.stopping:
                raise BrokerClosed(CLOSED_IN_LOADING)
        finally:
            self._opening = None
        self._thread = thread
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def _running(self) -> "EngineThread[EngineLoop]":
        if self._thread is None:
            raise BrokerClosed("the broker is not open: use it inside `async with`")
        return self._thread

    def _loaded(self) -> "LoadedModel":
        """The model, for its tokenizer and chat template: these may be used in any thread."""
        self._running()
        assert self._text is not None
        return self._text

    def _open(self, thread: "EngineThread[EngineLoop]") -> "EngineLoop":
        """Load the model and start the engine; in the engine's thread."""
        # Here and not at the top: MLX is slow to import, and only this thread may touch it.
        from .engine.loop import EngineLoop
        from .engine.settings import EngineSettings

        def report(progress: "Progress") -> None:
            if thread.stopping:
                raise BrokerClosed(CLOSED_IN_LOADING)
            if self._progress is not None:
                self._progress(progress)

        recorder = Recorder(
            path=self._trace, model=self._model, backend=" ".join(describe()).strip()
        )
        try:
            model = self._load(report)
            settings = EngineSettings(
                self._ram,
                self._max_rows,
                self._prefill_chunk,
                self._memory,
                self._cold,
                self._cold_bytes,
                self._wired,
                self._max_queue,
            )

            def post(run: Callable[[], None]) -> None:
                thread.post_from_finaliser(lambda engine: run())

            with runnable(model.name):
                engine = EngineLoop(model, recorder, settings, post)
        except BaseException:
            recorder.close()
            raise
        self.recorder, self._text = recorder, model
        self.model_name, self.context_length = model.name, model.context_length
        return engine

    def _load(self, progress: "Callable[[Progress], None]") -> "LoadedModel":
        from .models import load

        return load(self._model, dtype=self._dtype, progress=progress)


class ResponseStream:
    """The events of one request, each given out once. Iterate, or use as an async context manager.

    A reader may be slow: deltas it has not read are merged. Leaving the context or dropping the
    stream cancels the request.
    """

    def __init__(
        self, request: RequestId, mailbox: Mailbox, thread: "EngineThread[EngineLoop]"
    ) -> None:
        self.request = request
        self._mailbox = mailbox
        self._thread = thread

    def cancel(self) -> None:
        """End the request within one prefill chunk or decode step; what it computed is kept.

        Does not wait. The stream then ends with a `Completed` whose finish reason is "cancelled".
        Safe anywhere, from any thread, and when the request has ended already.
        """
        if not self._mailbox.ended:
            request = self.request
            self._thread.post_from_finaliser(lambda engine: engine.cancel(request))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamEvent:
        event = await self._mailbox.receive()
        if event is None:
            raise StopAsyncIteration
        return event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()


@contextmanager
def runnable(model: str) -> Iterator[None]:
    """Report whatever a model's first steps lead to as `ModelUnreadable`."""
    try:
        yield
    except SwarmError:
        raise
    except Exception as error:  # a configuration can be read and still make no sense to the model
        lines = str(error).strip().splitlines() or [""]
        reason = f"{type(error).__name__}: {lines[0]}"
        raise ModelUnreadable(f"{model} was loaded but cannot run: {reason}") from error


def _folder(cold: str | os.PathLike[str]) -> Path:
    """The folder that `cold` names; raises `InvalidSetting` for what cannot be one."""
    if not isinstance(cold, str | os.PathLike) or not str(cold) or "\0" in str(cold):
        raise InvalidSetting(f"cold is {cold!r}; it must be the path of a folder")
    try:
        folder = Path(cold).expanduser()
    except RuntimeError as error:  # of a user who is not there
        raise InvalidSetting(f"cold is {cold!r}; {error}") from error
    if folder.exists() and not folder.is_dir():
        raise InvalidSetting(f"{folder} is not a folder; cold must be one, or not exist yet")
    return folder


def parse_size(size: int | str) -> int:
    """Bytes of "2GiB", "512MB", "1.5 GB", or of a number. Raises `InvalidSetting`."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)\s*", str(size))
    unit = SIZE_UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or isinstance(size, bool | float):
        raise InvalidSetting(
            f'{size!r} is not a size; give bytes, or text such as "2GiB" or "512MB"'
        )
    return int(float(match[1]) * unit)
