"""The prompt cache: KV computed for one prompt serves every prompt that starts with its tokens."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import mlx.core as mx
import msgspec

from ..affinity import ThreadGuard
from ..errors import CacheError, OutOfMemory, SwarmError
from ..trace.events import Put
from .cold import ColdMatch, ColdStore, Flushed, Spill
from .eviction import EvictionPolicy, EvictionQueue
from .flushing import flush
from .holdings import Holdings
from .intake import CacheRow, Intake, Row, Stored, validated
from .lease import Lender, PromptLease
from .ledger import Ledger
from .listing import Listing, listing
from .logprobs import Logprobs, known_logprobs
from .lookup import Lookup, put_points
from .measure import measure
from .node import Node
from .plan import Plan
from .prefix_hash import Tokens, TokenSource, as_tokens
from .reasons import Forgotten
from .reporter import Reporter, Trace
from .restores import Restoration, Restores
from .room import Room
from .space import Space, resident_bytes
from .statistics import CacheStatistics, NamespaceStatistics
from .steering import Steering
from .tree import MonotoneClock, PrefixTree
from .writes import ColdWrites

__all__ = ["Entry", "PromptCache", "PromptLease", "Stored"]

CHECKPOINT_SHARE = 2
"""One byte of the budget in so many may be checkpoints."""

PINNED_SHARE = 2
"""One byte of the budget in so many may be pinned."""

WRITE_SHARE = 4
"""One byte of the budget in so many may be on its way to the cold tier."""

_log = logging.getLogger(__name__)


class Entry(NamedTuple):
    """A stored sequence: its name, length, the bytes on its path, and who keeps it."""

    name: str
    tokens: int
    bytes: int
    leases: int
    pinned: bool


class PromptCache:
    """Sequences of many namespaces under one budget of `max_bytes`; 0 turns the cache off.

    `cold` is the tier below, `spill` a sink for what is evicted, `policy` orders the leaves without
    hints, `ledger` is the account that the bytes are charged to, `trace` hears of entries. `on_put`
    is called with the namespace and the tokens of what was stored, `on_written` from any thread
    when a write has ended, so that `write_behind` can go on. All calls come from one thread.

    Where a look-up takes `alternatives`, None asks for KV alone; with a number, the prompt's
    log-probabilities are needed too, each with that many of the likeliest tokens in its place.
    Tokens' own are kept beside their KV in RAM, alternatives never: what is usable ends one token
    before the first that is not known, with alternatives at once (`no_logprobs`).
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        cold: ColdStore | None = None,
        spill: Spill | None = None,
        policy: EvictionPolicy | None = None,
        ledger: Ledger | None = None,
        trace: Trace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_bytes = max_bytes
        self.on_put: Callable[[str, Tokens], None] | None = None
        self.on_written: Callable[[], None] | None = None
        self._guard = ThreadGuard()
        self._clock = MonotoneClock(clock)
        self._spaces: dict[str, Space] = {}
        self._queue = EvictionQueue(policy, self._clock)
        self._holdings = Holdings(ledger)
        self._lender = Lender(self._holdings, self._guard)
        self._reporter = Reporter(trace)
        forgotten = Forgotten()
        self._writes = (
            ColdWrites(
                cold,
                self._lender,
                max_bytes // WRITE_SHARE,
                self._reporter,
                self._clock,
                lambda: self.on_written() if self.on_written is not None else None,
            )
            if cold is not None
            else None
        )
        self._cold = cold
        self._room = Room(
            max_bytes,
            max_bytes // CHECKPOINT_SHARE,
            spaces=self._spaces,
            holdings=self._holdings,
            queue=self._queue,
            lender=self._lender,
            forgotten=forgotten,
            reporter=self._reporter,
            writes=self._writes,
            spill=spill,
        )
        self._lender.on_released = self._room.make
        self._intake = Intake(self._holdings, self._room, self._reporter, self._writes)
        self._restores = (
            Restores(cold, self._intake, self._holdings, self._reporter, self._clock)
            if cold is not None
            else None
        )
        self._lookup = Lookup(self._spaces, forgotten, self._restores, max_bytes)
        self._steering = Steering(
            self._spaces, self._intake, self._lender, max_bytes // PINNED_SHARE
        )

    # Looking up

    def plan(
        self, tokens: TokenSource, namespace: str = "", alternatives: int | None = None
    ) -> Plan:
        """Where the KV of `tokens` would come from. Changes nothing."""
        self._guard.check()
        space = self._peek(namespace)
        return self._lookup.look(as_tokens(tokens), space, alternatives=alternatives).plan

    def take(
        self, tokens: TokenSource, namespace: str = "", alternatives: int | None = None
    ) -> PromptLease | None:
        """A clone of the deepest usable prefix, restored first if that pays; None if there is none.

        At least one token is left to forward. The donor stays as it is.
        """
        restoration = self.restoration(tokens, namespace, alternatives)
        if restoration is not None:
            restoration.run()
        return self.lease(tokens, namespace, restoration, alternatives)

    def restoration(
        self, tokens: TokenSource, namespace: str = "", alternatives: int | None = None
    ) -> Restoration | None:
        """The reading that the plan asks for, to be `run` in any thread; None if it asks for none,
        or if there is no memory for what would be read.

        Prompts that need the same stored sequence share one. It has its memory until a `lease` is
        asked for with it.
        """
        self._guard.check()
        if self._restores is None:
            return None
        wanted, space = as_tokens(tokens), self._peek(namespace)
        look = self._lookup.look(wanted, space, alternatives=alternatives)
        if look.cold is None:
            return None
        under_way = self._restores.under_way(look.cold, space)
        return under_way or self._begin_reading(look.cold, space, wanted, look.plan.ram_tokens)

    def lease(
        self,
        tokens: TokenSource,
        namespace: str = "",
        restoration: Restoration | None = None,
        alternatives: int | None = None,
    ) -> PromptLease | None:
        """What `take` does once nothing is left to read; `restoration`, if any, must have run."""
        self._settle()
        wanted, space = as_tokens(tokens), self._space(namespace)
        look = self._lookup.look(wanted, space, self._promote(restoration, space), alternatives)
        found = before = look.plan.ram_tokens
        if restoration is not None:
            before = min(restoration.ram_tokens, found)
        plan = msgspec.structs.replace(
            look.plan,
            ram_tokens=before,
            cold_tokens=found - before,
            reason="not_worth_waiting" if look.cold is not None else look.plan.reason,
        )
        _count(space, plan)
        if not found:
            return None
        logprobs = None if alternatives is None else known_logprobs(look.match.walk)[: found + 1]
        node = self._intake.boundary(space, look.match.walk, found)
        space.tree.touch(node)
        self._holdings.use_checkpoint(node)
        lease = self._lender.lend(space, node, plan)
        lease.logprobs = logprobs
        return lease

    def renew(self, tokens: TokenSource, namespace: str = "") -> PromptLease | None:
        """A lease on what RAM has of a prompt that runs already; no look-up is counted."""
        self._settle()
        wanted, space = as_tokens(tokens), self._peek(namespace)
        look = self._lookup.look(wanted, space)
        if not look.plan.ram_tokens:
            return None
        node = self._intake.boundary(space, look.match.walk, look.plan.ram_tokens)
        plan = msgspec.structs.replace(look.plan, cold_tokens=0)
        return self._lender.lend(space, node, plan)

    def readers(self, lease: PromptLease) -> int:
        """How many leases, this one included, read the extent that it ends in; 0 for no KV."""
        return self._lender.readers(lease.ranges[-1].extent) if lease.ranges else 0

    def peek_prefix_len(
        self, tokens: TokenSource, namespace: str = "", alternatives: int | None = None
    ) -> int:
        """Tokens of a prompt that RAM can serve. Refreshes nothing."""
        self._guard.check()
        wanted = as_tokens(tokens)
        return self._peek(namespace).match(wanted, len(wanted) - 1, alternatives).length

    def find_exact(self, tokens: TokenSource, namespace: str = "") -> Entry | None:
        """The entry of exactly these tokens, if all of it is in RAM and usable at its end."""
        self._guard.check()
        space = self._peek(namespace)
        node = space.tree.find(tokens)
        if node is None or not node.is_entry or not space.usable_at(node):
            return None
        pinned = node in space.tree.pinned_nodes()
        size = resident_bytes(node.path())
        return Entry(str(space.tree.name(node)), node.stop, size, node.leases, pinned)

    def put_points(
        self, tokens: TokenSource, namespace: str = "", boundaries: Iterable[int] = ()
    ) -> tuple[int, ...]:
        """The lengths, ascending, at which a prefill of `tokens` should pause and `put`.

        They are the marked boundaries, and for layers that cannot be cut anywhere also where the
        prompt leaves a stored path and every `CHECKPOINT_EVERY` tokens.
        """
        self._guard.check()
        return put_points(as_tokens(tokens), self._peek(namespace), set(boundaries))

    # Storing

    def put(
        self,
        tokens: TokenSource,
        caches: Sequence[Any] | Row,
        namespace: str = "",
        lease: PromptLease | None = None,
        logprobs: Logprobs | None = None,
    ) -> Stored:
        """Store the KV of `tokens`, held by `caches` at that offset; the caller keeps them.

        Takes mlx-lm cache objects, clones, or a row. `lease` is the one the caches were taken with,
        `logprobs` are those of the tokens, NaN where they are unknown; what is stored without gets
        them too, if there is room.
        Raises `CacheError` if they do not hold exactly these tokens or differ from the namespace's,
        `UnsupportedCacheKind` for a class without a codec; nothing is changed then.
        """
        self._settle()
        key = as_tokens(tokens)
        if not self.max_bytes:
            return Stored(0, 0, "off")
        space = self._space(namespace)
        try:
            row = validated(key, caches, space, lease, logprobs)
        except SwarmError:
            space.counts["rejected"] += 1
            raise
        stored, node = self._intake.store(space, key, row, logprobs)
        if node is None:
            self._refused(space, key, row, stored)
            return stored
        space.counts["puts"] += 1
        space.counts["duplicates"] += not stored.new_tokens
        if self._writes is not None:
            self._writes.want(space, node)
        self._announce(space, key, node, stored)
        self._room.tidy()
        return stored

    def clear(self, namespace: str | None = None) -> None:
        """Forget a namespace, or everything. Leases stay valid; nothing is spilled."""
        self._settle()
        names = list(self._spaces) if namespace is None else [namespace]
        for name in names:
            if name in self._spaces:
                for node in self._spaces[name].restart():
                    self._holdings.vacate(node, None)
                    if self._writes is not None:
                        self._writes.left(node)
        mx.clear_cache()

    def demote_idle(self, idle_seconds: float, now: float | None = None) -> int:
        """Let go of leaves unused for so long that the cold tier or a sink has; returns how many.

        Without either it does nothing. What is still being written goes at a later call.
        """
        self._settle()
        if not self._room.has_refuge:
            return 0
        demoted = self._room.demote_idle((self._clock() if now is None else now) - idle_seconds)
        if demoted:
            self._holdings.compact_until(lambda: not self._holdings.reclaimable_bytes)
            mx.clear_cache()
        return demoted

    def write_behind(self) -> bool:
        """Begin to write one sequence that was put and that only RAM has; False if there is none,
        or none can be taken now. The cold tier writes it in the background.
        """
        self._settle()
        return self._writes is not None and self._writes.begin_wanted()

    def flush(self, timeout: float, namespaces: Collection[str] | None = None) -> Flushed:
        """Write what only RAM has to the cold tier, for at most `timeout` seconds: of all
        namespaces, or of some.

        Returns how many lengths could not be restored after a crash now, and their bytes.
        """
        self._settle()
        spaces = [
            space
            for name, space in self._spaces.items()
            if namespaces is None or name in namespaces
        ]
        return flush(spaces, self._writes, self._cold, timeout)

    # Steering

    def pin(self, tokens: TokenSource, namespace: str = "", ttl: float = 300.0) -> int:
        """Keep what is stored of `tokens` for `ttl` seconds; returns how many tokens that is.

        Raises `CacheError` if more than half of the budget would be pinned, or for a `ttl` that is
        not positive.
        """
        self._settle()
        return self._steering.pin(self._peek(namespace), as_tokens(tokens), ttl)

    def unpin(self, tokens: TokenSource, namespace: str = "") -> int:
        """Let a pin end that holds exactly these tokens; returns how many, or 0 for none."""
        self._settle()
        return self._steering.unpin(self._peek(namespace), tokens)

    def unpin_all(self) -> bool:
        """Let all pins end; whether there were any."""
        return self._steering.unpin_all()

    def prioritise(self, tokens: TokenSource, priority: int, namespace: str = "") -> int:
        """Keep what is stored of `tokens` until all of a lower priority (0 unless raised) has left.

        Returns how many tokens that is. A priority is only ever raised.
        """
        self._settle()
        return self._steering.prioritise(self._peek(namespace), as_tokens(tokens), priority)

    def next_use(
        self,
        target: TokenSource | PromptLease,
        eta: float,
        namespace: str = "",
        *,
        instead: bool = False,
    ) -> None:
        """Hint that a prompt, or the sequence of a lease, is needed again in `eta` seconds.

        `inf` stands for never. With `instead` this takes the place of the hints before.
        """
        self._guard.check()
        self._steering.next_use(self._peek(namespace), target, eta, instead)

    def give_way(self, nbytes: int) -> bool:
        """Evict until the ledger has `nbytes` for somebody else; whether it has."""
        self._settle()
        return self._room.make(elsewhere=nbytes)

    def shrink(self, nbytes: int) -> bool:
        """Evict until `nbytes` less are held, to the cold tier if there is one.

        Stops at what is leased or pinned. Whether anything went, or is on its way to go.
        """
        self._settle()
        return self._room.shrink(nbytes)

    def note_prefill(
        self, tokens: int, seconds: float, namespaces: Collection[str] = ("",)
    ) -> None:
        """Tell the cost gate of restores how long computing `tokens` of these namespaces took."""
        if self._restores is not None:
            self._restores.gate.note_prefill(tokens, seconds, namespaces)

    def note_restore(self, nbytes: int, seconds: float) -> None:
        """The same for reading, by who times it otherwise than by this cache's clock."""
        if self._restores is not None:
            self._restores.gate.note_restore(nbytes, seconds)

    # Telling about itself

    @property
    def total_bytes(self) -> int:
        """Bytes of KV that the cache keeps alive: distinct extents and checkpoints."""
        return self._holdings.total_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that the ledger would let the cache take now, whatever its own budget."""
        return self._holdings.allowed_bytes

    @property
    def spare_bytes(self) -> int:
        """Bytes at most that nothing which runs reads, pinned ones included."""
        return self._holdings.unread_bytes

    @property
    def is_writing(self) -> bool:
        """Whether something is on its way to the cold tier; it may leave RAM once it is there."""
        return self._writes is not None and self._writes.pending_bytes > 0

    @property
    def is_reading(self) -> bool:
        """Whether something is on its way from the cold tier, and has memory of its own so far."""
        return self._restores is not None and self._restores.is_reading

    @property
    def hits(self) -> int:
        """Takes that RAM could serve, whatever the cold tier had."""
        return sum(space.counts["hits"] for space in self._spaces.values())

    @property
    def misses(self) -> int:
        """Takes for which RAM had nothing."""
        return sum(space.counts["misses"] for space in self._spaces.values())

    @property
    def demotions(self) -> int:
        """Nodes that left RAM because the cold tier or a sink has them."""
        return self._room.demotions

    def tree(self, namespace: str = "") -> PrefixTree:
        """The index of a namespace, to be read."""
        return self._peek(namespace).tree

    @property
    def namespaces(self) -> tuple[str, ...]:
        """The namespaces that there are."""
        return tuple(self._spaces)

    def entries(self, namespace: str = "", offset: int = 0, limit: int = 100) -> Listing:
        """The entries of a namespace from `offset` on, the last used first."""
        self._guard.check()
        return listing(self._peek(namespace), offset, limit)

    def statistics(self) -> CacheStatistics:
        """Sizes and counts, per namespace and in total; takes time in proportion to the nodes."""
        self._guard.check()
        is_durable = self._writes.was_stored if self._writes is not None else None
        each = {
            name: measure(space, self._holdings, self._lender, is_durable)
            for name, space in self._spaces.items()
        }
        total = sum(each.values(), start=NamespaceStatistics())
        return CacheStatistics(
            max_bytes=self.max_bytes,
            total=total,
            namespaces=each,
            leases=len(self._lender) - (self._writes.leases if self._writes is not None else 0),
            departing_bytes=self._lender.departing_bytes,
            cold=self._cold.statistics() if self._cold is not None else None,
        )

    def check_integrity(self) -> None:
        """Assert every invariant of every part; for tests and idle moments."""
        self._guard.check()
        nodes: list[Node] = []
        for space in self._spaces.values():
            space.tree.check_integrity()
            nodes.extend(space.tree.nodes())
        self._queue.check_integrity()
        self._holdings.check_integrity(nodes, self._lender.spans())
        if self._writes is not None:
            self._writes.check_integrity(set(nodes))

    # Helpers

    def _begin_reading(
        self, cold: ColdMatch, space: Space, wanted: Tokens, ram_tokens: int
    ) -> Restoration | None:
        assert self._restores is not None
        with ExitStack() as kept:
            if cold.bytes > self.free_bytes:
                # What this very prompt has in RAM is not to go for the rest of it.
                own = self.renew(wanted, space.name)
                kept.callback(own.release if own is not None else lambda: None)
                self._room.make(elsewhere=cold.bytes)
            try:
                return self._restores.start(cold, space, wanted, ram_tokens)
            except OutOfMemory:
                space.counts["restores_refused"] += 1
                return None

    def _promote(self, restoration: Restoration | None, space: Space) -> int | None:
        """Make what was read resident; returns the tokens that RAM should have now."""
        if restoration is None:
            return None
        assert self._restores is not None
        assert self._writes is not None
        node = self._restores.promote(restoration, space)
        if node is not None:
            self._writes.cover(node)
        return restoration.match.length

    def _refused(self, space: Space, key: Tokens, row: Row | CacheRow, stored: Stored) -> None:
        if stored.refusal != "oversize":
            space.counts["unstored"] += 1
            return
        space.counts["oversize"] += 1
        if isinstance(row, CacheRow):
            self._room.pass_on(space, key, row.caches)

    def _announce(self, space: Space, key: Tokens, node: Node, stored: Stored) -> None:
        self._reporter.emit(
            lambda now: Put(
                time=now,
                entry=str(space.tree.name(node)),
                namespace=space.name,
                tokens=len(key),
                new_tokens=stored.new_tokens,
                bytes=stored.new_bytes,
            )
        )
        if self.on_put is None:
            return
        try:
            self.on_put(space.name, key)
        except Exception:
            _log.exception("on_put failed in namespace %r", space.name)

    def _settle(self) -> None:
        """Check who is calling, and take note of writes that ended."""
        self._guard.check()
        if self._room.is_spilling:
            raise CacheError("a spill sink may only read the cache that calls it")
        if self._writes is not None:
            self._writes.drain()

    def _space(self, namespace: str) -> Space:
        if namespace not in self._spaces:
            self._spaces[namespace] = self._peek(namespace)
        return self._spaces[namespace]

    def _peek(self, namespace: str) -> Space:
        """A namespace, or an empty one that nobody keeps."""
        return self._spaces.get(namespace) or Space(namespace, self._queue, self._clock)


def _count(space: Space, plan: Plan) -> None:
    space.counts["hits" if plan.ram_tokens else "misses"] += 1
    space.counts["hit_tokens"] += plan.usable_tokens
    space.counts["missed_tokens"] += plan.to_prefill
    if plan.reason is not None:
        space.reasons[plan.reason] += 1
