"""The engine's loop without a thread or an event loop: turn by turn, in the test's own thread."""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_swarm.broker import Completed, Delta, Request
from mlx_swarm.broker.engine.loop import EngineLoop
from mlx_swarm.broker.engine.settings import EngineSettings
from mlx_swarm.broker.engine.submission import MAX_QUEUE, Submission
from mlx_swarm.broker.models import LoadedModel
from mlx_swarm.broker.request import RequestId, StreamEvent, TokenLogprob
from mlx_swarm.broker.trace.recorder import Recorder

TIE = 1e-4
"""Two logits that are closer than this are a tie: the order of sums decides."""


class Box:
    """Stands for a mailbox."""

    def __init__(self) -> None:
        self.events: list[StreamEvent] = []
        self.error: Exception | None = None

    def put(self, event: StreamEvent) -> None:
        self.events.append(event)

    def fail(self, error: Exception) -> None:
        self.error = error

    @property
    def tokens(self) -> list[int]:
        """The tokens received so far."""
        deltas = [event for event in self.events if isinstance(event, Delta)]
        return [token for delta in deltas for token in delta.tokens]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """The log-probabilities received so far."""
        deltas = [event for event in self.events if isinstance(event, Delta)]
        return [logprob for delta in deltas for logprob in delta.logprobs]

    @property
    def end(self) -> Completed | None:
        """How it ended, if it has."""
        last = self.events[-1] if self.events else None
        return last if isinstance(last, Completed) else None

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self.error is not None or self.end is not None


class Driver:
    """An engine and the requests that it was given."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        ram: int = 64 << 20,
        max_rows: int = 8,
        chunk: int = 32,
        memory: int = 0,
        cold: Path | None = None,
        max_queue: int = MAX_QUEUE,
        idle_unload: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._sleep = sleep
        cold_bytes = 1 << 30 if cold else 0
        settings = EngineSettings(
            ram,
            max_rows,
            chunk,
            memory,
            cold,
            cold_bytes,
            max_queue=max_queue,
            idle_unload=idle_unload,
        )
        self.recorder = Recorder(clock=clock)
        self.engine = EngineLoop(model, self.recorder, settings)
        self.boxes: list[Box] = []

    def submit(self, request: Request, *, seconds_ago: float = 0.0) -> Box:
        """Queue a request; its box is the next one."""
        box: Any = Box()
        name = RequestId(f"request-{len(self.boxes)}")
        self.boxes.append(box)
        submitted = self.recorder.now() - seconds_ago
        self.engine.submit(Submission(name, request, box, submitted))
        return box  # type: ignore[no-any-return]

    def stagger(self, requests: Sequence[Request], turns: Callable[[], int]) -> list[Box]:
        """Queue requests with so many turns after each, and run all to their end."""
        boxes = []
        for request in requests:
            boxes.append(self.submit(request))
            self.run(turns())
        self.run()
        return boxes

    def cancel(self, index: int) -> None:
        """Cancel the request of that number."""
        self.engine.cancel(RequestId(f"request-{index}"))

    def preempt(self, index: int) -> bool:
        """Take the request of that number from its row, if it has one; whether it had."""
        row = self.engine._rows.get(RequestId(f"request-{index}"))
        if row is None or row.admitted is None or not row.opened:
            return False
        if self.engine.scheduler._entries[row.id] not in self.engine.scheduler._runners():
            return False
        self.engine._endings.guarded(row, self.engine.relief.suspend, "", "memory")
        self.engine.check_integrity()
        return True

    def run(self, turns: int = 1 << 30) -> None:
        """So many turns, or until nothing is left to do."""
        while turns and (self.engine.turn() or self._waits()):
            turns -= 1

    def _waits(self) -> bool:
        """Sleep until a write has ended that somebody waits for, or until a session need not wait
        any more; False if nobody waits.
        """
        if self.engine.cache.is_writing and self.engine.scheduler.queued:
            time.sleep(0.001)
            self.engine.scheduler.memory_changed()
            return True
        change = self.engine.sessions.policy.next_change()
        if change == math.inf:
            return False
        self._sleep(max(change - self.recorder.now(), 0.0))
        return True

    def decode_all(self, boxes: Sequence[Box], tokens: int) -> None:
        """Turns until each of the boxes has received that many tokens."""
        while any(len(box.tokens) < tokens for box in boxes):
            assert self.engine.turn()

    def check_idle(self) -> None:
        """Assert that nothing of any request is left."""
        self.engine.check_integrity()
        statistics = self.engine.statistics()
        assert statistics.cache.leases == 0
        for model in statistics.models.values():
            assert model.lane.batch.rows == 0
            assert model.lane.batch.tails.bytes == 0
        assert statistics.memory.reserved["tails"] == 0
        assert all(box.over for box in self.boxes)


def assert_greedy(
    model: LoadedModel, prompt: Sequence[int], tokens: Sequence[int], tie: float = TIE
) -> None:
    """Assert that each token has the highest of mlx-lm's logits after those before it, ties
    excepted.
    """
    if not tokens:
        return
    text = [*prompt, *tokens[:-1]]
    logits = model.model(mx.array([text]), cache=model.make_caches())[0, len(prompt) - 1 :]
    best = logits.max(axis=-1)
    chosen = mx.take_along_axis(logits, mx.array(list(tokens))[:, None], axis=-1)[:, 0]
    size = mx.maximum(mx.abs(logits).max(), 1.0)
    assert ((best - chosen).max() <= tie * size).item()
