"""A server of the Responses API in the test's own event loop, and raw clients of its WebSocket."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import anyio
from msgspec.structs import replace
from websockets.asyncio.client import ClientConnection, connect

from mlx_swarm.broker import Broker
from mlx_swarm.broker.server.app import create_app
from mlx_swarm.broker.server.entrance.listening import listen
from mlx_swarm.broker.server.serve import Server
from mlx_swarm.broker.server.service import Service
from mlx_swarm.broker.server.settings import ServerSettings
from tests.tiny_broker import TINY, check_idle

ENDS = ("response.completed", "response.incomplete", "response.failed", "error")

Event = dict[str, Any]


class Running(NamedTuple):
    """A server: its port, and what is behind it."""

    port: int
    service: Service

    @property
    def url(self) -> str:
        """The address of its API over HTTP."""
        return f"http://127.0.0.1:{self.port}/v1"

    def connect(self, **options: Any) -> connect:
        """A raw client, to be entered."""
        headers = {"authorization": f"Bearer {options.pop('key')}"} if "key" in options else None
        options = {"max_size": None, "compression": None, **options}
        url = f"ws://127.0.0.1:{self.port}/v1/responses"
        return connect(url, additional_headers=headers, **options)

    async def check_idle(self, responses: int = 0) -> None:
        """Assert that soon nothing is left of any request, and so many responses are stored."""
        with anyio.fail_after(30):
            while True:
                try:
                    assert len(self.service.stores.shared) >= responses
                    return await self._check()
                except AssertionError:
                    await anyio.sleep(0.01)

    async def _check(self) -> None:
        await check_idle(self.service.broker)
        assert len(self.service.stores.live) == 0
        assert self.service.draining.running == 0


@asynccontextmanager
async def running(
    model: str = TINY, *, settings: ServerSettings | None = None, **broker: Any
) -> AsyncIterator[Running]:
    """A server for as long as the context is open; nothing may be left of any request then."""
    chosen = replace(settings or ServerSettings(), port=0)
    async with Broker(model, **{"ram": "64MiB", **broker}) as opened:
        app = create_app(opened, chosen)
        service: Service = app.state.service
        sockets, ready, over = listen(chosen), anyio.Event(), anyio.Event()
        server = Server(app, chosen, sockets, lambda url: ready.set())

        async def serve() -> None:
            with anyio.CancelScope(shield=True):
                await server.run_until_drained(service.draining)
            over.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve)
            await ready.wait()
            found = Running(sockets[0].getsockname()[1], service)
            try:
                yield found
                await found.check_idle()
            finally:
                service.draining.stop()
                with anyio.CancelScope(shield=True):
                    await over.wait()


async def say(client: ClientConnection, **event: Any) -> None:
    """Send an event."""
    await client.send(json.dumps(event))


async def create(client: ClientConnection, input: str = "hi", **fields: Any) -> None:
    """Ask for a response of a few tokens."""
    await say(client, type="response.create", input=input, **{"max_output_tokens": 6, **fields})


async def hear(client: ClientConnection) -> Event:
    """The next event."""
    event: Event = json.loads(await client.recv())
    return event


async def events(client: ClientConnection, until: Sequence[str] = ENDS) -> list[Event]:
    """The events up to the first of these types."""
    found: list[Event] = []
    while not found or found[-1]["type"] not in until:
        found.append(await hear(client))
    return found


async def answer(client: ClientConnection, input: str = "hi", **fields: Any) -> Event:
    """The response to an input, as its last event has it."""
    await create(client, input, **fields)
    last = (await events(client))[-1]
    assert last["type"] != "error", last
    response: Event = last["response"]
    return response


def text_of(response: Event) -> str:
    """What a response says."""
    return "".join(
        part["text"]
        for item in response["output"]
        if item["type"] == "message"
        for part in item["content"]
    )


def check_numbers(found: list[Event]) -> None:
    """Assert that the events of one response are numbered in their order."""
    numbers = [event["sequence_number"] for event in found if "sequence_number" in event]
    assert numbers == sorted(set(numbers))
