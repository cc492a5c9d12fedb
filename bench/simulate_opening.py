"""Admission where reading the cold tier takes time on a clock that is not the real one."""

from collections.abc import Callable, Mapping, Sequence

from mlx_swarm.broker.cache.prompt_cache import PromptCache
from mlx_swarm.broker.cache.restores import Restoration
from mlx_swarm.broker.engine.endings import Endings
from mlx_swarm.broker.engine.memory import RowMemory
from mlx_swarm.broker.engine.opening import Opening
from mlx_swarm.broker.engine.restoring import Restoring
from mlx_swarm.broker.engine.row import Row
from mlx_swarm.broker.engine.scheduler import Scheduler
from mlx_swarm.broker.request import RequestId
from mlx_swarm.broker.trace.recorder import Recorder

Begin = Callable[[Restoration, Row, Callable[[], None]], None]


class TimedOpening(Opening):
    """Readings take time: `begin` is told of each, and calls what it is given once that is over."""

    def __init__(
        self,
        rows: Mapping[RequestId, Row],
        scheduler: Scheduler,
        memory: RowMemory,
        endings: Endings,
        cache: PromptCache,
        recorder: Recorder,
        on_start: Callable[[RequestId], None],
        join: Callable[[Row], None],
        begin: Begin,
    ) -> None:
        super().__init__(
            rows, scheduler, memory, endings, cache, recorder, on_start, join, post=None
        )
        self._restoring = _TimedRestoring(self._restored, begin)


class _TimedRestoring(Restoring):
    """One reading at a time."""

    def __init__(
        self,
        on_done: Callable[[Restoration, Row, Sequence[Row]], None],
        begin: Begin,
    ) -> None:
        super().__init__(on_done, None)
        self._begin = begin

    def begin(self, restoration: Restoration, row: Row) -> None:
        """Start a reading for a row."""
        assert self._current is None
        self._current = restoration, row
        self._begin(restoration, row, self._end)

    def _end(self) -> None:
        assert self._current is not None
        self._current[0].run()
        self._done()
