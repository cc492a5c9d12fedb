"""Decoding in mlx-lm's own batches, for models that cannot use ours: every row has a copy of all
its KV.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import CacheList

from ..cache.kinds import materialise
from ..errors import EngineFailed
from ..models import LoadedModel
from .decode_batch import DecodeStatistics
from .row import Row, RowToken
from .stock_sampling import Watcher, stock_sampling


class ReplicatedDecoder:
    """Decodes rows in a `BatchGenerator`. After a `step` that raised, `reset` starts anew."""

    def __init__(self, model: LoadedModel, max_rows: int) -> None:
        self._model = model
        self._max_rows = max_rows
        self._rows: dict[int, Row] = {}
        self._watchers: dict[int, Watcher] = {}
        self._ended: dict[Row, tuple[Sequence[int], Sequence[Any]]] = {}
        self._generator: Any = self._new_generator()

    @property
    def running(self) -> list[Row]:
        """The rows that decode."""
        return list(self._rows.values())

    @property
    def rows(self) -> list[Row]:
        """The same: nothing else is in the batch."""
        return self.running

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Nothing is shared."""
        return ()

    def join(self, row: Row) -> None:
        """Let a row take part; copies its caches."""
        caches = materialise(row.caches) if row.position else self._model.make_caches()
        mx.eval([cache.state for cache in caches if row.position])
        reason = unbatchable(caches)
        if reason:
            raise EngineFailed(f"{reason}: such rows belong in the serial lane")
        sampler, processors, watcher = stock_sampling(row)
        (uid,) = self._generator.insert(
            [row.sequence[-1:].tolist()],
            max_tokens=[row.left],
            caches=[caches],
            all_tokens=[row.sequence[:-1].tolist()],
            samplers=[sampler],
            logits_processors=[processors],
        )
        self._rows[uid] = row
        if watcher:
            self._watchers[uid] = watcher
        mx.clear_cache()

    def step(self) -> list[RowToken]:
        """One token for each row (none for rows that joined just now)."""
        _, responses = self._generator.next()
        # In flight with the step that the generator has just started, ahead of the one after it.
        mx.async_eval([w.seen[-1].arrays for w in self._watchers.values() if w.seen])
        return [self._received(response) for response in responses]

    def holds(self, row: Row) -> bool:
        """Whether the row decodes, or has ended and was not removed."""
        return row in self._ended or row in self._rows.values()

    def computed(self, row: Row) -> tuple[Sequence[int], Sequence[Any]]:
        """What of a row was forwarded, and the caches that hold it. The row decodes no more."""
        if row not in self._ended:
            uid = self._uid(row)
            caches, tokens = self._generator.remove([uid], return_prompt_caches=True)[uid]
            self._forget(uid)
            self._ended[row] = tokens, caches
        return self._ended[row]

    def remove(self, row: Row) -> None:
        """Take a row out. Doing so again is harmless."""
        if self._ended.pop(row, None) is None and row in self._rows.values():
            uid = self._uid(row)
            self._generator.remove([uid])
            self._forget(uid)

    def reset(self) -> None:
        """Drop all rows, after a step that failed."""
        self._rows, self._watchers, self._ended = {}, {}, {}
        self._generator.close()
        self._generator = self._new_generator()

    def close(self) -> None:
        """End the batch."""
        self._rows, self._watchers, self._ended = {}, {}, {}
        if self._generator is not None:
            self._generator.close()
        self._generator = None

    def statistics(self) -> DecodeStatistics:
        """How many rows decode."""
        return DecodeStatistics(rows=len(self._rows))

    def check_integrity(self) -> None:
        """Assert that no row that ended is still kept."""
        assert not self._ended

    def _uid(self, row: Row) -> int:
        return next(uid for uid, each in self._rows.items() if each is row)

    def _received(self, response: Any) -> RowToken:
        row, watcher = self._rows[response.uid], self._watchers.get(response.uid)
        if response.finish_reason is not None:
            self._forget(response.uid)
            self._ended[row] = response.all_tokens, response.prompt_cache
        logprob = watcher.next(response.token) if watcher else None
        finished = row.grammar is not None and row.grammar.finished
        return RowToken(
            row, response.token, "stop" if finished else response.finish_reason, logprob
        )

    def _forget(self, uid: int) -> None:
        del self._rows[uid]
        self._watchers.pop(uid, None)

    def _new_generator(self) -> Any:
        return BatchGenerator(
            self._model.model,
            stop_tokens=[[token] for token in sorted(self._model.tokenizer.eos_token_ids)],
            completion_batch_size=self._max_rows,
            prefill_batch_size=self._max_rows,
            # One stream for everything, so that what is put or taken is ordered with the steps.
            stream=mx.default_stream(mx.default_device()),
        )


def unbatchable(caches: Iterable[Any]) -> str:
    """Why mlx-lm cannot decode rows with such caches in one batch; "" if it can."""
    for cache in caches:
        if type(cache) is CacheList:
            reason = unbatchable(cache.caches)
        elif not hasattr(cache, "merge"):
            reason = f"{type(cache).__name__} cannot be batched with history"
        elif getattr(cache, "keep", 0):
            # Merged all the same, into a ring that lets go of them.
            name = type(cache).__name__
            reason = f"{name} that keeps its first {cache.keep} tokens cannot be batched"
        else:
            continue
        if reason:
            return reason
    return ""
