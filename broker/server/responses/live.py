"""The responses that are computed now, and the events of those that have just ended."""

from collections import OrderedDict
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from .ring import EventRing

if TYPE_CHECKING:
    from .run import ResponseRun

ENDED_RINGS = 64


class LiveRuns:
    """Runs by id. A run that nobody holds any more is none."""

    def __init__(self) -> None:
        self._runs: WeakValueDictionary[str, ResponseRun] = WeakValueDictionary()
        self._ended: OrderedDict[str, EventRing] = OrderedDict()

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, run: "ResponseRun") -> None:
        """Remember a run until it is removed."""
        self._runs[run.id] = run

    def remove(self, run: "ResponseRun") -> None:
        """It has ended; its events are kept until 64 others have."""
        self._runs.pop(run.id, None)
        if run.response.store:
            self._ended[run.id] = run.ring
        if len(self._ended) > ENDED_RINGS:
            self._ended.popitem(last=False)

    def events(self, id: str) -> EventRing | None:
        """The events of a response that has ended, if they are still here."""
        return self._ended.get(id)

    def forget(self, id: str) -> None:
        """Let go of the events of a response that has ended."""
        self._ended.pop(id, None)

    def find(self, id: str, tenant: str) -> "ResponseRun | None":
        """A tenant's run that can be asked for: one with `store: false` cannot."""
        run = self._runs.get(id)
        if run is None or run.caller.tenant != tenant or not run.response.store:
            return None
        return run

    def is_running(self, tenant: str, agent: str) -> bool:
        """Whether anything of that agent is computed now."""
        return any(
            run.caller.tenant == tenant and run.caller.agent == agent
            for run in list(self._runs.values())
        )
