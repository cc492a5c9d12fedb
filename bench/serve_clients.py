"""Clients: the Python API, WebSockets, and chat completions over HTTP, all with the same jobs."""

import asyncio
import http.client
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import anyio
import msgspec
from msgspec import Struct
from websockets.asyncio.client import ClientConnection, connect

from bench.serve_servers import Server
from mlx_swarm.broker import Broker, Delta, Message, Request

WAIT_SECONDS = 600.0
LARGEST_MESSAGE = 16 << 20


class ChatJob(NamedTuple):
    """Instructions, what is asked, and how many tokens come back."""

    instructions: str
    asked: str
    output: int


class Came(NamedTuple):
    """What came of one job: seconds to the first token and to the end, and tokens."""

    first: float
    seconds: float
    output: int
    prompt: int
    cached: int


class Outcome(NamedTuple):
    """What came of all, and seconds to the end of the last."""

    came: Sequence[Came]
    seconds: float

    @property
    def rate(self) -> float:
        """Output tokens a second."""
        return sum(each.output for each in self.came) / self.seconds

    @property
    def computed(self) -> int:
        """Prompt tokens that were not cached."""
        return sum(each.prompt - each.cached for each in self.came)


class _Event(Struct):
    type: str
    stream_id: str = ""
    response: dict[str, Any] | None = None
    error: Any = None


async def through_api(broker: Broker, jobs: Sequence[ChatJob]) -> Outcome:
    """Streams of a broker in this process."""
    return await _all([partial(_ask, broker, job) for job in jobs])


async def over_sockets(server: Server, jobs: Sequence[ChatJob]) -> Outcome:
    """A WebSocket for each job; connecting is not counted."""
    sockets = [await _connect(server) for _ in jobs]
    try:
        pairs = zip(sockets, jobs, strict=True)
        return await _all([partial(_alone, server, socket, job) for socket, job in pairs])
    finally:
        await asyncio.gather(*[socket.close() for socket in sockets])


async def over_one_socket(server: Server, jobs: Sequence[ChatJob]) -> Outcome:
    """All jobs as lanes of one WebSocket."""
    async with await _connect(server) as socket:
        start = time.perf_counter()
        for lane, job in enumerate(jobs):
            await socket.send(_create(server, job, str(lane)))
        firsts: dict[str, float] = {}
        came: list[Came] = []
        while len(came) < len(jobs):
            event = _read(await socket.recv())
            seconds = time.perf_counter() - start
            if event.type == "response.output_text.delta":
                firsts.setdefault(event.stream_id, seconds)
            elif event.response is not None and event.type in ENDS:
                came.append(_came(event, firsts.get(event.stream_id, seconds), seconds))
        return Outcome(came, time.perf_counter() - start)


def over_http(server: Server, jobs: Sequence[ChatJob]) -> Outcome:
    """Chat completions, a thread and a connection each."""
    with ThreadPoolExecutor(len(jobs)) as threads:
        start = time.perf_counter()
        came = list(threads.map(lambda job: chat(server, _messages(job), job.output)[0], jobs))
        return Outcome(came, time.perf_counter() - start)


def chat(server: Server, messages: Sequence[object], output: int) -> tuple[Came, str]:
    """One streamed chat completion, and its text."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_SECONDS)
    body = {
        "model": server.model,
        "messages": messages,
        "max_tokens": output,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        start = time.perf_counter()
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise RuntimeError(f"status {response.status}: {response.read()[:500]!r}")
        return _read_chunks(response, start)
    finally:
        connection.close()


ENDS = ("response.completed", "response.incomplete")


def _read_chunks(response: http.client.HTTPResponse, start: float) -> tuple[Came, str]:
    text, usage, first = "", dict[str, Any](), 0.0
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[len(b"data: ") :])
        piece = "".join(each["delta"].get("content") or "" for each in chunk["choices"])
        if piece and not first:
            first = time.perf_counter() - start
        text += piece
        usage = chunk.get("usage") or usage
    seconds = time.perf_counter() - start
    details = usage.get("prompt_tokens_details") or {}
    came = Came(
        first or seconds,
        seconds,
        usage["completion_tokens"],
        usage["prompt_tokens"],
        details.get("cached_tokens", 0),
    )
    return came, text


async def _ask(broker: Broker, job: ChatJob, start: float) -> Came:
    messages = [Message("system", job.instructions), Message("user", job.asked)]
    first = 0.0
    async with broker.stream(Request(messages=messages, max_tokens=job.output)) as stream:
        async for event in stream:
            if isinstance(event, Delta):
                first = first or time.perf_counter() - start
            last = event
    usage = last.usage  # type: ignore[union-attr]
    seconds = time.perf_counter() - start
    return Came(first, seconds, usage.output_tokens, usage.prompt_tokens, usage.cached_tokens)


async def _alone(server: Server, socket: ClientConnection, job: ChatJob, start: float) -> Came:
    await socket.send(_create(server, job))
    first = 0.0
    while True:
        event = _read(await socket.recv())
        seconds = time.perf_counter() - start
        if event.type == "response.output_text.delta":
            first = first or seconds
        elif event.response is not None and event.type in ENDS:
            return _came(event, first or seconds, seconds)


async def _all(jobs: Sequence[Callable[[float], Awaitable[Came]]]) -> Outcome:
    came: list[Came] = []
    start = time.perf_counter()

    async def one(job: Callable[[float], Awaitable[Came]]) -> None:
        came.append(await job(start))

    async with anyio.create_task_group() as tasks:
        for job in jobs:
            tasks.start_soon(one, job)
    return Outcome(came, time.perf_counter() - start)


async def _connect(server: Server) -> ClientConnection:
    url = f"ws://127.0.0.1:{server.port}/v1/responses"
    return await connect(url, max_size=LARGEST_MESSAGE, compression=None)


def _create(server: Server, job: ChatJob, lane: str | None = None) -> str:
    body = {
        "type": "response.create",
        "model": server.model,
        "instructions": job.instructions,
        "input": job.asked,
        "max_output_tokens": job.output,
        "temperature": 0,
        "store": False,
    }
    return json.dumps(body if lane is None else {**body, "stream_id": lane})


def _read(message: str | bytes) -> _Event:
    event = msgspec.json.decode(message, type=_Event)
    if event.type in ("error", "response.failed"):
        raise RuntimeError(f"the server answered {message!r:.500}")
    return event


def _came(event: _Event, first: float, seconds: float) -> Came:
    assert event.response is not None
    usage = event.response["usage"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    return Came(first, seconds, usage["output_tokens"], usage["input_tokens"], cached)


def _messages(job: ChatJob) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": job.instructions},
        {"role": "user", "content": job.asked},
    ]
