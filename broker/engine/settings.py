"""What an engine is given, and what it tells about itself."""

from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from ..cache.ledger import LedgerStatistics
from ..cache.statistics import CacheStatistics
from ..request import Usage
from .batch import LaneStatistics
from .pressure import PressureStatistics
from .scheduler import SchedulerStatistics
from .serial import DRAFT_TOKENS, SerialStatistics
from .session import SessionsStatistics
from .submission import MAX_QUEUE


class EngineSettings(NamedTuple):
    """`ram` and `memory` are in bytes, `prefill_chunk` in tokens. `ram` is for the prompt cache,
    `memory` for everything; 0 takes the limit from the device. Without `prefill_chunk` chunks are
    sized by time (`Pace`). `cold` is the folder of the tier below, of at most `cold_bytes`. With
    `wired` Metal keeps resident as much as it recommends. `max_queue` requests may wait while
    `max_rows` run. Models that nobody has used for `idle_unload` seconds are unloaded.
    Draft models propose `draft_tokens` at a time.
    """

    ram: int
    max_rows: int
    prefill_chunk: int | None
    memory: int = 0
    cold: Path | None = None
    cold_bytes: int = 0
    wired: bool = False
    max_queue: int = MAX_QUEUE
    idle_unload: float | None = None
    draft_tokens: int = DRAFT_TOKENS


class ModelStatistics(Struct, frozen=True, kw_only=True):
    """A model in memory: `weights` in bytes (an adapter's own, where it is one of `base`), requests
    that are open, and the lanes that serve it.
    """

    base: str
    weights: int
    requests: int
    lane: LaneStatistics
    serial: SerialStatistics


class EngineStatistics(Struct, frozen=True, kw_only=True):
    """Requests by state, the agents' sessions, what all requests together have cost so far, the
    models that are loaded, the prompt cache, the memory ledger, and what the process really takes.
    """

    requests: SchedulerStatistics
    sessions: SessionsStatistics
    usage: Usage
    models: dict[str, ModelStatistics]
    cache: CacheStatistics
    memory: LedgerStatistics
    pressure: PressureStatistics

    @property
    def lane(self) -> LaneStatistics:
        """The batch lane of the first model."""
        return next(iter(self.models.values())).lane
