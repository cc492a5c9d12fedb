"""Reading from the cold tier: what it has, whether reading pays, promoting what was read."""

import logging
import threading
import time
from collections.abc import Callable, Collection

from ..errors import CacheError, CorruptFile, SwarmError
from ..trace.events import Quarantined
from ..trace.events import Restored as RestoredEvent
from .cold import ColdMatch, ColdStore, Restored
from .holdings import Holdings
from .intake import Intake, validated
from .ledger import Purpose, Reservation
from .node import Node
from .prefix_hash import Tokens
from .reporter import Reporter
from .space import Space

RATE_WEIGHT = 0.3
"""Weight of the newest measurement in a rate."""

_log = logging.getLogger(__name__)


class CostGate:
    """Whether reading is faster than computing, by measured rates; yes until both are known."""

    def __init__(self) -> None:
        self.restore_rate = 0.0
        """Bytes read in a second; 0 before the first restore."""
        self.prefill_rates: dict[str, float] = {}
        """Tokens of a namespace computed in a second, once that is known: models differ."""

    def note_restore(self, size: int, seconds: float) -> None:
        """`size` bytes were read in `seconds`."""
        self.restore_rate = _blend(self.restore_rate, size, seconds)

    def note_prefill(
        self, tokens: int, seconds: float, namespaces: Collection[str] = ("",)
    ) -> None:
        """`tokens` of any of these namespaces were computed in `seconds`."""
        for namespace in namespaces:
            rate = self.prefill_rates.get(namespace, 0.0)
            self.prefill_rates[namespace] = _blend(rate, tokens, seconds)

    def opens_for(self, size: int, gained: int, namespace: str = "") -> bool:
        """Whether to read `size` bytes in order not to compute `gained` tokens."""
        prefill_rate = self.prefill_rates.get(namespace, 0.0)
        if not self.restore_rate or not prefill_rate:
            return True
        return size / self.restore_rate < gained / prefill_rate


class Restoration:
    """One reading of a stored sequence, shared by all who wait for it.

    `ram_tokens` is what RAM could serve when it was asked for. After `run` either `restored` or
    `error` is set. What is read is promised `memory` until it is made resident.
    """

    def __init__(
        self,
        match: ColdMatch,
        tokens: Tokens,
        ram_tokens: int,
        read: Callable[[ColdMatch], Restored],
        memory: Reservation,
    ) -> None:
        self.memory = memory
        self.match = match
        self.tokens = tokens
        self.ram_tokens = ram_tokens
        self.restored: Restored | None = None
        self.error: Exception | None = None
        self.seconds = 0.0
        self.is_settled = False
        self._read = read
        self._lock = threading.Lock()

    def run(self) -> None:
        """Read, or wait for whoever is reading. Never raises. May be called in any thread."""
        with self._lock:
            if self.restored is not None or self.error is not None:
                return
            started = time.monotonic()
            try:
                self.restored = self._read(self.match)
            except Exception as error:
                self.error = error
            self.seconds = time.monotonic() - started


class Restores:
    """A cold store as the cache reads it."""

    def __init__(
        self,
        store: ColdStore,
        intake: Intake,
        holdings: Holdings,
        reporter: Reporter,
        clock: Callable[[], float],
    ) -> None:
        self.gate = CostGate()
        self._store = store
        self._intake = intake
        self._holdings = holdings
        self._reporter = reporter
        self._clock = clock
        self._under_way: dict[tuple[str, str], Restoration] = {}

    def find(self, tokens: Tokens, namespace: str, ram_tokens: int) -> ColdMatch | None:
        """What the store has for a prompt; a store that fails has nothing."""
        try:
            return self._store.find(tokens, namespace, ram_tokens)
        except Exception:
            _log.exception("the cold store failed to look up a prompt")
            return None

    @property
    def is_reading(self) -> bool:
        """Whether something was begun to be read that was not made resident so far."""
        return bool(self._under_way)

    def under_way(self, match: ColdMatch, space: Space) -> Restoration | None:
        """The reading of a match that was begun before, if there is one."""
        return self._under_way.get((space.name, match.name))

    def start(self, match: ColdMatch, space: Space, tokens: Tokens, ram_tokens: int) -> Restoration:
        """A new reading of a match. Raises `OutOfMemory` where there is no memory for it."""
        memory = self._holdings.reserve(Purpose.RESTORES, match.bytes)
        prefix = tokens[: match.length].copy()
        restoration = Restoration(match, prefix, ram_tokens, self._read, memory)
        self._under_way[space.name, match.name] = restoration
        return restoration

    def promote(self, restoration: Restoration, space: Space) -> Node | None:
        """Make what was read resident; only the first caller's call does something.

        Returns the new entry's node. None if it was unusable (it is dropped then), if RAM has no
        room for it, or if another caller was first.
        """
        self._under_way.pop((space.name, restoration.match.name), None)
        if restoration.is_settled:
            return None
        restoration.is_settled = True
        # From here on it is the cache's, which makes room for it as for anything else.
        restoration.memory.cancel()
        restored = restoration.restored
        if restored is None:
            self._discard(restoration, space)
            return None
        if space.tree.walk(restoration.tokens).length < restoration.match.start:
            # Nothing is wrong with what was read: what it continues has left RAM meanwhile.
            restoration.error = CacheError(f"the first {restoration.match.start} tokens are gone")
            space.counts["unstored"] += 1
            self._pass_hook(None, restored)
            return None
        node = self._take_in(restoration, restored, space)
        self._pass_hook(node, restored)
        return node

    def _take_in(self, restoration: Restoration, restored: Restored, space: Space) -> Node | None:
        try:
            row = validated(restoration.tokens, restored.caches, space)
            _, node = self._intake.store(space, restoration.tokens, row)
        except SwarmError as error:
            restoration.error = error
            self._discard(restoration, space)
            return None
        space.counts["restores" if node is not None else "unstored"] += 1
        if node is not None:
            self._announce(restoration, space, node)
        return node

    def _announce(self, restoration: Restoration, space: Space, node: Node) -> None:
        match = restoration.match
        self._reporter.emit(
            lambda now: RestoredEvent(
                time=now,
                entry=str(space.tree.name(node)),
                namespace=space.name,
                tokens=match.length - restoration.ram_tokens,
                length=match.length,
                bytes=match.bytes,
                seconds=restoration.seconds,
            )
        )

    def _pass_hook(self, node: Node | None, restored: Restored) -> None:
        """Have the store's release hook called, now if nothing was made of what it gave."""
        if restored.release is None:
            return
        if node is not None:
            self._holdings.on_release(node, restored.release)
            return
        try:
            restored.release()
        except Exception:
            _log.exception("the release hook of an unused restore failed")

    def _read(self, match: ColdMatch) -> Restored:
        started = self._clock()
        restored = self._store.restore(match)
        self.gate.note_restore(match.bytes, self._clock() - started)
        return restored

    def _discard(self, restoration: Restoration, space: Space) -> None:
        """What was read is unusable: say so, and have the store forget it."""
        space.counts["restore_failures"] += 1
        match, error = restoration.match, restoration.error
        if isinstance(error, CorruptFile):
            self._reporter.emit(
                lambda now: Quarantined(
                    time=now,
                    entry=match.name,
                    namespace=space.name,
                    bytes=match.bytes,
                    error=str(error),
                )
            )
        _log.error("dropped the unusable cold entry %s: %s", match.name, restoration.error)
        try:
            self._store.delete(match)
        except Exception:
            _log.exception("the cold store failed to delete %s", match.name)


def _blend(rate: float, amount: int, seconds: float) -> float:
    if seconds <= 0:
        return rate
    newest = amount / seconds
    return RATE_WEIGHT * newest + (1 - RATE_WEIGHT) * rate if rate else newest
