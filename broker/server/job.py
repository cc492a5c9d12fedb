"""The whole life of `mlx-swarm serve`: load, serve, end in order."""

import asyncio
import socket
from collections.abc import Callable

import anyio

from ..backend import BLAS_HINT, describe
from ..broker import Broker
from ..interrupts import INTERRUPTS
from ..models.progress import Progress
from .app import create_app
from .serve import Server, load_all
from .settings import ServerSettings

LOADING_ENDS = "stopping as soon as loading allows"
SERVING_ENDS = "no new work is taken, and what runs has {seconds:g} s to end"

Tell = Callable[[str], None]


async def run(settings: ServerSettings, sockets: list[socket.socket], tell: Tell) -> bool:
    """Serve until a signal comes; whether one did. Says how it is getting on through `tell`."""
    loop = asyncio.get_running_loop()
    INTERRUPTS.notice = LOADING_ENDS
    with anyio.CancelScope() as loading:
        ends = [loading.cancel]
        # The loop may be asleep, and a signal does not wake it.
        with INTERRUPTS.ended_by(lambda: loop.call_soon_threadsafe(lambda: ends[-1]())):
            stages = _Stages(tell)
            options = settings.broker_options()
            async with Broker(settings.model, progress=stages.report, **options) as broker:
                await load_all(broker, settings)
                if describe().is_slow:
                    tell(BLAS_HINT)
                app = create_app(broker, settings)
                draining = app.state.service.draining
                server = Server(app, settings, sockets, lambda url: tell(_welcome(broker, url)))
                ends.append(draining.start)
                INTERRUPTS.notice = SERVING_ENDS.format(seconds=settings.drain_seconds)
                await server.run_until_drained(draining)
    return INTERRUPTS.received is not None


class _Stages:
    """Tells of each stage of loading once."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._last = ""

    def report(self, progress: Progress) -> None:
        """Called in the engine's thread."""
        if progress.stage != self._last:
            self._last = progress.stage
            self._tell(f"model: {progress.stage}")


def _welcome(broker: Broker, url: str) -> str:
    return (
        f"serving {broker.model_name} at {url} (try: curl {url}/v1/models, "
        f"or a client with OPENAI_BASE_URL={url}/v1)"
    )
