"""The broker: the async facade over the engine thread. Works on asyncio and trio."""

import itertools
import math
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from anyio import get_cancelled_exc_class, to_thread
from msgspec import Struct

from .backend import describe, require_mlx
from .checks import check_kind, check_range, check_sized, check_text, check_wait, is_number
from .engine.fairness import Party
from .engine.mailbox import Mailbox
from .engine.submission import MAX_QUEUE, Submission
from .engine.thread import EngineThread
from .errors import (
    BrokerClosed,
    EngineFailed,
    InvalidRequest,
    InvalidSetting,
    ModelNotFound,
    ModelUnreadable,
    SwarmError,
)
from .inspection import CacheView
from .request import (
    Completed,
    Message,
    ModelInfo,
    Request,
    RequestId,
    Tool,
    check_messages,
    check_tools,
)
from .response import ResponseStream
from .sizes import parse_size
from .texts import Addition, Texts
from .trace.recorder import Recorder, RecorderStatistics

if TYPE_CHECKING:
    from .cache.cold import Flushed
    from .engine.loop import EngineLoop
    from .engine.settings import EngineStatistics
    from .models import ChatFormat, LoadedModel, Progress, Rendered

CLOSED_IN_LOADING = "the broker was closed while its model was loading"
MOST_FLUSH_SECONDS = 86_400.0
MAX_PINNED = 3600.0


class BrokerStatistics(Struct, frozen=True, kw_only=True):
    """What is going on and what it has cost: requests and prompt cache, and the trace."""

    engine: "EngineStatistics"
    trace: RecorderStatistics


class Broker:
    """Serves many agents from one prompt cache: with one model, or several (see `load`).

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
    while nothing decodes, half a second's worth). A draft model (`Request.draft`) proposes
    `draft_tokens` at a time, up to 16. Models that nobody has used for `idle_unload` seconds leave
    memory until somebody asks for them again (default: they stay). `trace` is a file for the trace
    events; `progress` is called, in the engine thread, while the model loads.

    An async context manager: entering loads the model, leaving ends everything, also what is still
    being streamed. Raises `InvalidSetting`, and `BackendMissing` where MLX is not installed.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
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
        idle_unload: float | None = None,
        draft_tokens: int = 3,
        trace: str | os.PathLike[str] | None = None,
        progress: "Callable[[Progress], None] | None" = None,
    ) -> None:
        self._ram = parse_size(ram)
        self._memory = 0 if memory is None else parse_size(memory)
        self._cold = None if cold is None else _folder(cold)
        self._cold_bytes = parse_size(cold_limit)
        counts = {"max_rows": max_rows, "max_queue": max_queue, "draft_tokens": draft_tokens}
        if prefill_chunk is not None:
            counts["prefill_chunk"] = prefill_chunk
        for name, value in counts.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidSetting(f"{name} is {value!r}; it must be at least 1, and whole")
        idle = 1.0 if idle_unload is None else idle_unload
        if not is_number(idle) or not 0 < idle < math.inf:
            raise InvalidSetting(f"idle_unload is {idle_unload!r}; it must be seconds, more than 0")
        if not isinstance(wired, bool):
            raise InvalidSetting(f"wired is {wired!r}; it must be True or False")
        require_mlx()
        self._model = os.fspath(model) if isinstance(model, os.PathLike) else model
        self._idle_unload = idle_unload
        self._draft_tokens = draft_tokens
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
        self._texts: Texts | None = None
        self.model_name = str(model)
        self.context_length = 0
        self.recorder: Recorder

    def stream(self, request: Request) -> ResponseStream:
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

    async def load(
        self, model: str | os.PathLike[str], *, name: str | None = None, dtype: str | None = None
    ) -> ModelInfo:
        """Put one more model into service; requests name it as `Request(model=name)`.

        `model` is what a `Broker` takes. Fetching and converting goes on beside everything else;
        while the weights are read, no request goes on. Where memory lacks for them the cache gives
        way first, then models that nobody uses. Raises `OutOfMemory` where that is not enough,
        `InvalidRequest` for a name that is taken, and `ModelError` for what cannot be loaded. Where
        the caller is cancelled nothing stays loaded, unless others have begun to use it.
        """
        spec = _spec(model)
        return await self._add(name or spec, spec, dtype, "")

    async def load_adapter(
        self, folder: str | os.PathLike[str], *, name: str, base: str = ""
    ) -> ModelInfo:
        """Put a LoRA adapter of mlx-lm, in `folder`, into service over the weights of the model
        `base` (default: the first one), which are in memory once. Requests name it like a model.

        What was computed with an adapter is found by its content: another adapter under the same
        name shares nothing with it. Raises as `load` does.
        """
        check_text("base", base)
        return await self._add(name, str(folder), None, base or self.model_name)

    async def alias(self, name: str, existing: str) -> ModelInfo:
        """Give a model one more name. Raises `InvalidRequest` for one that is taken."""
        check_text("name", name)
        check_text("existing", existing)
        thread, texts = self._running(), self._known()
        return await thread.call(lambda engine: texts.alias(engine, name, existing))

    async def unload(self, name: str) -> None:
        """Let go of a model and the adapters over it. Their prompts stay in the cache.

        Raises `ModelNotFound`, `ModelBusy` while requests to it are open, and `InvalidRequest` for
        the first model.
        """
        check_text("name", name)
        thread, texts = self._running(), self._known()
        await thread.call(lambda engine: texts.unload(engine, name))

    async def models(self) -> tuple[ModelInfo, ...]:
        """The models that requests can name, the first one first."""
        return await self._running().call(lambda engine: engine.models())

    async def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        model: str = "",
        thinking: bool | None = None,
    ) -> "Rendered":
        """Messages and tools as the chat template of a model puts them, ready for a reply.

        `thinking` turns reasoning on or off, for models that leave the choice.
        """
        check_messages(messages)
        check_tools(tools)
        if thinking is not None:
            check_kind("thinking", thinking, bool, "True, False or None")
        chat = self.chat_format(model)
        return await to_thread.run_sync(lambda: chat.render(messages, tools, thinking=thinking))

    def chat_format(self, model: str = "") -> "ChatFormat":
        """How a model takes part in conversations; raises `ModelNotFound`."""
        return self._text_of(model).chat

    def context_of(self, model: str = "") -> int:
        """How many tokens a model's context has. Raises `ModelNotFound`."""
        return self._text_of(model).context_length

    async def encode(self, text: str, *, model: str = "") -> list[int]:
        """Text as tokens of a model."""
        check_text("text", text)
        return await to_thread.run_sync(self._text_of(model).encode, text)

    async def decode(self, tokens: Sequence[int], *, model: str = "") -> str:
        """Tokens of a model as text, special ones included; raises `InvalidRequest` for others."""
        check_sized("tokens", tokens)
        return await to_thread.run_sync(self._text_of(model).decode, tokens)

    def next_use(
        self, seconds: float, *, agent: str = "", swarm: str = "", tenant: str = ""
    ) -> None:
        """Say in how many seconds an agent is expected to go on, whatever its last request said.

        With `inf` it has ended: its own KV leaves first. Without `agent` that holds for all of the
        swarm. Does not wait. Raises `InvalidRequest`.
        """
        check_wait("seconds", seconds)
        party = _party(agent, swarm, tenant)
        self._running().post_from_finaliser(lambda engine: engine.sessions.next_use(party, seconds))

    async def pin(self, seconds: float, *, agent: str, swarm: str = "", tenant: str = "") -> int:
        """Keep in memory what an agent said last, for a pause of about so many seconds.

        Lasts until `unpin`, and twice as long at most; where nothing runs and a request needs that
        memory, no longer. Returns how many tokens are kept, 0 if memory has none. Raises
        `CacheError` where half of the cache would be pinned, and `InvalidRequest`.
        """
        check_range("seconds", seconds, 0.0, MAX_PINNED, open_low=True)
        party = _party(agent, swarm, tenant)
        if not agent:
            raise InvalidRequest("agent is empty; a pin keeps what one agent said last")
        return await self._running().call(lambda engine: engine.sessions.pin(party, seconds))

    def unpin(self, *, agent: str, swarm: str = "", tenant: str = "") -> None:
        """End an agent's pin. Does not wait; harmless if there is none."""
        party = _party(agent, swarm, tenant)
        self._running().post_from_finaliser(lambda engine: engine.sessions.unpin(party))

    @asynccontextmanager
    async def holding(
        self, seconds: float, *, agent: str, swarm: str = "", tenant: str = ""
    ) -> AsyncIterator[int]:
        """`pin` for as long as the context is open, say while a tool runs."""
        kept = await self.pin(seconds, agent=agent, swarm=swarm, tenant=tenant)
        try:
            yield kept
        finally:
            with suppress(BrokerClosed):
                self.unpin(agent=agent, swarm=swarm, tenant=tenant)

    @property
    def cache_view(self) -> CacheView:
        """The prompt cache, to be looked into, pinned and cleared."""
        return CacheView(self._running(), self._known(), self.model_name)

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
        thread, self._thread, self._texts = self._thread or self._opening, None, None
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

    def _text_of(self, model: str) -> "LoadedModel":
        check_kind("model", model, str, "text")
        return self._known().named(model or self.model_name)

    def _known(self) -> Texts:
        self._running()
        assert self._texts is not None
        return self._texts

    async def _add(self, name: str, spec: str, dtype: str | None, base: str) -> ModelInfo:
        from .engine.roster import ModelSource
        from .models import prepare

        check_text("name", name)
        check_text("base", base)
        thread, source = self._running(), ModelSource(spec, dtype, base)
        addition = Addition(self._known(), name, source)
        report = self._reporting(thread, addition)

        def add(engine: "EngineLoop") -> ModelInfo:
            with runnable(name):
                return addition.do(engine)

        try:
            if not base:
                await to_thread.run_sync(
                    lambda: prepare(spec, progress=report), abandon_on_cancel=True
                )
            return await thread.call(add)
        except get_cancelled_exc_class():
            addition.is_given_up = True
            thread.post_from_finaliser(addition.undo)
            raise

    def _reporting(
        self, thread: "EngineThread[EngineLoop]", addition: Addition | None = None
    ) -> "Callable[[Progress], None]":
        def report(progress: "Progress") -> None:
            if thread.stopping or (addition is not None and addition.is_given_up):
                raise BrokerClosed(CLOSED_IN_LOADING)
            if self._progress is not None:
                self._progress(progress)

        return report

    def _open(self, thread: "EngineThread[EngineLoop]") -> "EngineLoop":
        """Load the model and start the engine; in the engine's thread."""
        # Here and not at the top: MLX is slow to import, and only this thread may touch it.
        from .engine.loop import EngineLoop
        from .engine.roster import ModelSource
        from .engine.settings import EngineSettings

        recorder = Recorder(
            path=self._trace, model=self._model, backend=" ".join(describe()).strip()
        )
        try:
            model = self._load(self._reporting(thread))
            settings = EngineSettings(
                self._ram,
                self._max_rows,
                self._prefill_chunk,
                self._memory,
                self._cold,
                self._cold_bytes,
                self._wired,
                self._max_queue,
                self._idle_unload,
                self._draft_tokens,
            )

            def post(run: Callable[[], None]) -> None:
                thread.post_from_finaliser(lambda engine: run())

            with runnable(model.name):
                source = ModelSource(self._model, self._dtype)
                engine = EngineLoop(model, recorder, settings, post, source)
        except BaseException:
            recorder.close()
            raise
        self.recorder, self._texts = recorder, Texts(model)
        self.model_name, self.context_length = model.name, model.context_length
        return engine

    def _load(self, progress: "Callable[[Progress], None]") -> "LoadedModel":
        from .models import load

        return load(self._model, dtype=self._dtype, progress=progress)


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


def _party(agent: str, swarm: str, tenant: str) -> Party:
    for name, value in {"agent": agent, "swarm": swarm, "tenant": tenant}.items():
        check_kind(name, value, str, "text")
    return Party(tenant, swarm, agent)


def _spec(model: str | os.PathLike[str]) -> str:
    if not isinstance(model, str | os.PathLike):
        raise ModelNotFound(f"no model {model!r}: a model is named by text or a path")
    return os.fsdecode(model)


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
