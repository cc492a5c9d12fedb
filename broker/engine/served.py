"""A model in service: the lanes that run its rows, and who makes rows of requests to it."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack

from ..backend import describe
from ..cache.ledger import Ledger, Purpose
from ..cache.prompt_cache import PromptCache
from ..models import LoadedModel, adapter_bytes
from .admission import Admission
from .batch import BatchLane
from .drafts import NO_DRAFTS
from .lane import Lane
from .memory import weight_bytes
from .pace import LEAST, LEAST_CUDA, Pace
from .row import Row
from .serial import SerialLane
from .settings import EngineSettings
from .submission import Submission

PREFILL_CHUNK = 512
"""Prompt tokens computed at once while nothing is known about the machine's speed."""


class Served:
    """One model, or an adapter over one, that takes requests. Charges its weights to the ledger:
    an adapter those that it does not have in common with its `base`.
    """

    def __init__(
        self,
        model: LoadedModel,
        cache: PromptCache,
        ledger: Ledger,
        settings: EngineSettings,
        afford: Callable[[Row, int], bool],
        base: LoadedModel | None = None,
        name: str = "",
        drafts: Mapping[str, LoadedModel] = NO_DRAFTS,
    ) -> None:
        self.model = model
        self._admission = Admission(model, drafts)
        least = LEAST_CUDA if describe().device == "cuda" else LEAST
        self.pace = Pace(PREFILL_CHUNK, settings.prefill_chunk, least)
        self._ledger = ledger
        self.weights = weight_bytes(model) if base is None else adapter_bytes(base, model)
        ledger.charge(Purpose.WEIGHTS, self.weights)
        try:
            self.batch = BatchLane(model, cache, settings.max_rows, self.pace, afford, name)
            self.serial = SerialLane(
                model,
                cache,
                self.batch.row_caches,
                self.batch.layout,
                self.batch.ahead,
                drafts,
                settings.draft_tokens,
                self.pace,
                name,
            )
        except BaseException:
            ledger.release(Purpose.WEIGHTS, self.weights)
            raise

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """All its lanes."""
        return (self.batch, self.serial)

    def row_for(self, submission: Submission) -> Row:
        """The row of a request. Raises `InvalidRequest` or `ContextOverflow`."""
        request = submission.request
        alone = request.deterministic or request.draft or self.batch.unbatchable
        return self._admission.row_for(submission, self.serial if alone else self.batch)

    def close(self) -> None:
        """End the lanes and give the weights back; nothing may be open."""
        with ExitStack() as last:
            last.callback(self._ledger.release, Purpose.WEIGHTS, self.weights)
            for lane in self.lanes:
                last.callback(lane.close)
