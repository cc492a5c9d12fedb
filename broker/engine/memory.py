"""Memory of the running rows: what the device has, and what each row may come to need of it."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..cache.ledger import Ledger, Purpose, format_bytes
from ..cache.prompt_cache import PromptCache
from ..errors import OutOfMemory
from ..models import LoadedModel
from .footprint import available
from .row import Row

_log = logging.getLogger(__name__)

POOL_SHARE = 16
"""MLX's pool of freed memory may be one part in so many of all memory."""


class RowMemory:
    """Promises every row the memory that it may come to need, out of the ledger.

    `need(row, known)` is that memory in bytes, `known` of the row's prompt tokens being in the
    cache. What is promised to rows the cache gives up, as far as nothing that runs reads it.
    """

    def __init__(self, ledger: Ledger, cache: PromptCache, need: Callable[[Row, int], int]) -> None:
        self.ledger = ledger
        self._cache = cache
        self._need = need
        self._rows = 0

    def require_possible(self, row: Row) -> None:
        """Raise `OutOfMemory` for a row that would not fit with nothing else there."""
        need = self._need(row, 0)
        if not self.ledger.fits_ever(Purpose.TAILS, need):
            weights = format_bytes(self.ledger.used(Purpose.WEIGHTS))
            raise OutOfMemory(
                f"{len(row.prompt):,} prompt tokens and up to {row.max_tokens:,} new ones need "
                f"{format_bytes(need)} of KV; the limit is {format_bytes(self.ledger.limit)}, of "
                f"which the weights take {weights}"
            )

    def is_granted(self, row: Row) -> bool:
        """Promise a row its memory, if it is to be had now.

        True also where no row has any, nothing is being written that could leave the cache then,
        and nothing read: waiting would change nothing, so `require` has to say so. Before that what
        is pinned may go.
        """
        try:
            self.require(row)
        except OutOfMemory:
            if self._rows or self._cache.is_writing or self._cache.is_reading:
                return False
            return not self._cache.unpin_all() or self.is_granted(row)
        except Exception:  # while room was made: `require` meets it again, for this row alone
            return True
        return True

    def require(self, row: Row) -> None:
        """Promise a row its memory, unless it has it. Raises `OutOfMemory` with the numbers."""
        if row.memory is not None:
            return
        need = self._need(row, self._known(row))
        if need > self.ledger.available(Purpose.TAILS):
            self._cache.give_way(need)
            # What had to go may have been of use to this very row.
            need = self._need(row, self._known(row))
        self._promise(row, need)

    def lack(self, row: Row) -> int:
        """Bytes that a row needs beyond what is to be had now and what the cache could give up."""
        if row.memory is not None:
            return 0
        need, available = self.shortage(row)
        return max(0, need - available - self._cache.spare_bytes)

    def shortage(self, row: Row) -> tuple[int, int]:
        """Bytes that a row needs, and bytes that it could have now."""
        return self._need(row, self._known(row)), self.ledger.available(Purpose.TAILS)

    def afford(self, row: Row, known: int) -> bool:
        """Promise a row no more and no less than it needs where it reads `known` tokens in the
        cache, if that is to be had; else it keeps what it has.
        """
        try:
            self.settle(row, known)
        except OutOfMemory:
            return False
        except Exception:  # while room was made; nobody's step is to fail for this
            _log.exception("no room could be made for what request %s is to copy", row.id)
            return False
        return True

    def settle(self, row: Row, known: int) -> None:
        """A row reads `known` tokens in the cache from now on: promise it what it needs then, no
        more. Raises `OutOfMemory`, never where it needs less than it has.
        """
        need = self._need(row, known)
        more = need - (row.memory.remaining if row.memory is not None else 0)
        if more > self.ledger.available(Purpose.TAILS):
            self._cache.give_way(more)
        self._promise(row, need)

    def trim(self, row: Row, nbytes: int) -> None:
        """Take back what was promised to a row beyond so many bytes."""
        if row.memory is not None:
            row.memory.resize(min(row.memory.remaining, nbytes))

    def release(self, row: Row) -> None:
        """Take back what was promised to a row. Doing so again is harmless."""
        if row.memory is not None:
            row.memory.cancel()
            row.memory = None
            self._rows -= 1

    def _known(self, row: Row) -> int:
        if not row.reads_cache:
            return 0
        lacking = row.lacking_alternatives
        return self._cache.peek_prefix_len(row.sequence, row.namespace, lacking)

    def _promise(self, row: Row, need: int) -> None:
        if row.memory is not None:
            row.memory.resize(need)
            return
        row.memory = self.ledger.reserve(Purpose.TAILS, need)
        self._rows += 1


@contextmanager
def bounded_pool(limit: int) -> Iterator[None]:
    """Let MLX keep no more than a part of `limit` bytes of freed memory for later.

    What is too much it gives back piece by piece. Without a bound long prompts leave tens of GB in
    sizes that nobody needs, and emptying the pool at once takes as long as ten decode steps.
    """
    bound = limit // POOL_SHARE
    _pool.add(bound)
    try:
        yield
    finally:
        _pool.remove(bound)


class PoolBounds:
    """The bounds of all engines of this process, of which the least counts; without any MLX's pool
    is as it was before the first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bounds: list[int] = []
        self._before = 0

    def add(self, bound: int) -> None:
        with self._lock:
            if not self._bounds:
                self._before = mx.set_cache_limit(bound)
            self._bounds.append(bound)
            self._set()

    def remove(self, bound: int) -> None:
        with self._lock:
            self._bounds.remove(bound)
            self._set()

    def _set(self) -> None:
        mx.set_cache_limit(min([self._before, *self._bounds]))


_pool = PoolBounds()


def weight_bytes(model: LoadedModel) -> int:
    """Bytes of a model's weights."""
    leaves: Any = tree_flatten(model.model.parameters())
    return sum(array.nbytes for _, array in leaves)


def device_limit() -> int:
    """Bytes that this process may use on MLX's device, those that it uses already included.

    On a Mac that is the working set that Metal recommends, with CUDA what other processes leave,
    on a CPU what the system, or the container, can hand out.
    """
    held = mx.get_active_memory() + mx.get_cache_memory()
    if mx.default_device() == mx.Device(mx.cpu):
        return available() + held
    facts = mx.device_info()
    recommended = int(facts.get("max_recommended_working_set_size", 0))
    free = int(facts.get("free_memory", 0)) + held if "free_memory" in facts else 0
    total = int(facts.get("memory_size", 0)) or int(facts.get("total_memory", 0))
    return recommended or free or total or available() + held
