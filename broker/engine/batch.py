"""The batch lane: continuous batching over stock mlx-lm models.

Prompts are prefilled one row at a time, chunk by chunk, on the lease's own caches; rows then decode
together in mlx-lm's `BatchGenerator`, which gets isolated copies of their caches.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from ..affinity import ThreadGuard
from ..cache.kinds import materialise
from ..cache.prefix_hash import Tokens
from ..cache.prompt_cache import PromptCache
from ..errors import EngineFailed, SwarmError
from ..models import LoadedModel
from .row import Row
from .self_test import self_test


class RowToken(NamedTuple):
    """One output token of a row. `finish_reason` is set with the row's last one."""

    row: Row
    token: int
    finish_reason: str | None


class BatchLane:
    """Runs rows from their lease to their last token. All calls from the thread that owns MLX.

    A method that raises leaves the lane usable; the row it was called for is then given up with
    `discard`. If `step` raises, all running rows are lost: `reset` starts an empty batch.
    """

    def __init__(self, model: LoadedModel, cache: PromptCache, max_rows: int) -> None:
        self._guard = ThreadGuard()
        self._guard.check()
        self._model = model
        self._cache = cache
        self._max_rows = max_rows
        self._self_test = self_test(model.model)
        self._running: dict[int, Row] = {}
        self._generator: Any = self._new_generator()

    @property
    def running(self) -> Sequence[Row]:
        """The rows that decode."""
        return list(self._running.values())

    def open(self, row: Row) -> None:
        """Give the row its caches: a clone of what the prompt cache has, or empty ones."""
        self._guard.check()
        if row.reads_cache:
            row.plan = self._cache.plan(row.prompt, row.namespace)
            row.lease = self._cache.take(row.prompt, row.namespace)
        if row.lease is None:
            row.caches = self._model.make_caches()
            return
        row.caches = self._self_test.usable(row.lease.caches)
        row.position = row.lease.length
        row.ram_tokens, row.cold_tokens = row.lease.ram_tokens, row.lease.cold_tokens

    def prefill(self, row: Row, stop: int) -> None:
        """Compute the row's prompt tokens up to `stop`; returns when they are computed."""
        self._guard.check()
        chunk = mx.array(row.prompt[row.position : stop])[None]
        self._model.model(chunk, cache=row.caches)
        mx.eval([cache.state for cache in row.caches])
        row.position = stop

    def store(self, row: Row) -> bool:
        """Put what the row has computed of its prompt; whether the cache took it."""
        return self._put(row, row.prompt[: row.position], row.caches)

    def join(self, row: Row) -> None:
        """Let the row, whose prompt is computed up to its last token, decode with the others."""
        self._guard.check()
        caches = materialise(row.caches) if row.position else self._model.make_caches()
        mx.eval([cache.state for cache in caches if row.position])
        unbatchable = next((cache for cache in caches if not hasattr(cache, "merge")), None)
        if unbatchable is not None:
            name = type(unbatchable).__name__
            raise EngineFailed(f"{name} cannot be batched with history; no other lane exists yet")
        (row.uid,) = self._generator.insert(
            [row.prompt[-1:].tolist()],
            max_tokens=[row.max_tokens],
            caches=[caches],
            all_tokens=[row.prompt[:-1].tolist()],
            samplers=[row.sampler],
        )
        self._running[row.uid] = row
        self._let_go(row)
        mx.clear_cache()

    def step(self) -> list[RowToken]:
        """One token for each running row (none for rows that joined just now).

        A row with a finish reason has left the batch; end it with `keep` or `discard`.
        """
        self._guard.check()
        _, responses = self._generator.next()
        return [self._received(response) for response in responses]

    def keep(self, row: Row) -> int:
        """End the row wherever it is and put what it computed; how many tokens were kept."""
        self._guard.check()
        if row.uid is not None:
            removed = self._generator.remove([row.uid], return_prompt_caches=True)
            row.caches, row.forwarded = removed[row.uid]
            self._forget(row)
        tokens = row.prompt[: row.position] if row.forwarded is None else row.forwarded
        kept = len(tokens) if len(tokens) and self._put(row, tokens, row.caches) else 0
        self._let_go(row)
        return kept

    def discard(self, row: Row) -> None:
        """End the row wherever it is, and keep nothing."""
        self._guard.check()
        if row.uid is not None:
            self._generator.remove([row.uid])
            self._forget(row)
        self._let_go(row)

    def reset(self) -> None:
        """Drop the batch after a step that failed; its rows have left."""
        self._guard.check()
        for row in self.running:
            self._forget(row)
        self._generator.close()
        self._generator = self._new_generator()

    def close(self) -> None:
        """End the batch and wait for what still runs."""
        self._guard.check()
        self._generator.close()
        self._generator = None
        # A thread that ends with work in flight can abort the process.
        mx.synchronize()

    def _received(self, response: Any) -> RowToken:
        row = self._running[response.uid]
        if response.finish_reason is not None:
            self._forget(row)
            row.caches, row.forwarded = response.prompt_cache, response.all_tokens
        return RowToken(row, response.token, response.finish_reason)

    def _put(self, row: Row, tokens: Sequence[int] | Tokens, caches: Sequence[Any]) -> bool:
        """Put, where a refusal costs nobody anything but the next hit."""
        self._guard.check()
        if not row.reads_cache:
            return False
        try:
            return self._cache.put(tokens, caches, row.namespace, row.lease).stored
        except SwarmError:
            return False

    def _forget(self, row: Row) -> None:
        assert row.uid is not None
        del self._running[row.uid]
        row.uid = None

    def _let_go(self, row: Row) -> None:
        row.caches = []
        if row.lease is not None:
            row.lease.release()
            row.lease = None

    def _new_generator(self) -> Any:
        return BatchGenerator(
            self._model.model,
            stop_tokens=[[token] for token in sorted(self._model.tokenizer.eos_token_ids)],
            completion_batch_size=self._max_rows,
            prefill_batch_size=self._max_rows,
            # One stream for everything, so that what is put or taken is ordered with the steps.
            stream=mx.default_stream(mx.default_device()),
        )
