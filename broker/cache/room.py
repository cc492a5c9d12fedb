"""Making room: which leaves go, who gets to see them first, and what is compacted instead."""

import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import mlx.core as mx

from ..trace.events import Demoted, Evicted
from .cold import OwnedSpill, Spill, SyncSpill
from .eviction import EvictionQueue
from .holdings import Holdings
from .kinds import materialise
from .lease import Lender, PromptLease
from .node import Node
from .plan import Plan
from .prefix_hash import Tokens
from .reasons import Forgotten
from .reporter import Reporter
from .space import Space, resident_bytes
from .writes import ColdWrites

POOL_SHARE = 16
"""MLX's pool of freed buffers may hold this fraction of the budget after an eviction."""

SLACK_SHARE = 4
"""Extents are compacted when more than one byte in so many is dead."""

_log = logging.getLogger(__name__)


class Room:
    """Evicts, spills, demotes and compacts, so that the bytes held stay under `max_bytes`."""

    def __init__(
        self,
        max_bytes: int,
        checkpoint_bytes: int,
        *,
        spaces: dict[str, Space],
        holdings: Holdings,
        queue: EvictionQueue,
        lender: Lender,
        forgotten: Forgotten,
        reporter: Reporter,
        writes: ColdWrites | None,
        spill: Spill | None,
    ) -> None:
        self.max_bytes = max_bytes
        self.checkpoint_bytes = checkpoint_bytes
        self.demotions = 0
        self.is_spilling = False
        """Whether a sink is being called, which must not change the cache under our feet."""
        self._is_making = False
        self._spaces = spaces
        self._holdings = holdings
        self._queue = queue
        self._lender = lender
        self._forgotten = forgotten
        self._reporter = reporter
        self._writes = writes
        self._spill = spill

    @property
    def has_refuge(self) -> bool:
        """Whether what leaves RAM goes anywhere."""
        return self._cold is not None or self._spill is not None

    def make(self, needed: int = 0, elsewhere: int = 0) -> bool:
        """Evict and compact until `needed` more bytes fit and the ledger has `elsewhere` bytes for
        others; whether that is so.

        What is on its way out (to a sink, or to the cold tier) may exceed the budget by as much as
        may be in flight. For others nothing goes that would not be enough.
        """
        target = self.max_bytes - needed
        needed += elsewhere
        # What is released while room is made must not make room by itself.
        if self._is_making or self._fits(target, needed, 0):
            return True
        if elsewhere and self._holdings.allowed_bytes + self._most_going() < needed:
            return False
        self._clear(target, needed)
        self._trim_pool()
        allowance = self._cold.limit if self._cold is not None else 0
        return self._fits(target + allowance, needed, 0)

    def shrink(self, nbytes: int) -> bool:
        """Evict and compact until `nbytes` less are held; whether any went, or are on their way."""
        before = self._holdings.total_bytes
        self._clear(before - nbytes, 0)
        is_leaving = self._lender.departing_bytes or (self._cold is not None and self._cold.leases)
        return self._holdings.total_bytes < before or bool(is_leaving)

    def tidy(self) -> None:
        """After a put: hold the cap; compact once more than a share of the extents is dead."""
        self.make()
        holdings = self._holdings
        if holdings.reclaimable_bytes > holdings.extent_bytes // SLACK_SHARE:
            holdings.compact_until(
                lambda: holdings.reclaimable_bytes <= holdings.extent_bytes // (2 * SLACK_SHARE)
            )

    def trim_checkpoints(self, needed: int = 0) -> bool:
        """Drop the least recently used checkpoints until `needed` more bytes fit their budget."""
        target = self.checkpoint_bytes - needed
        for node in list(self._holdings.checkpoints):
            if self._holdings.checkpoint_bytes <= target:
                break
            if not node.leases and not node.tree.is_pinned(node):
                self._drop_checkpoint(self._space(node), node)
        return self._holdings.checkpoint_bytes <= target

    def demote_idle(self, before: float) -> int:
        """Let go of the leaves last used before a time, as far as the cold tier covers them."""
        before_count = self.demotions
        for space in list(self._spaces.values()):
            for node in space.tree.leaves_first():
                idle = node.last_used <= before and not node.tree.is_pinned(node)
                if idle and node.is_held_leaf:
                    self._let_go(space, node, only_if_kept=True)
        if self._writes is not None and self._writes.drain():
            return self.demotions - before_count + self.demote_idle(before)
        return self.demotions - before_count

    def pass_on(self, space: Space, tokens: Tokens, caches: Sequence[Any]) -> bool:
        """Give an entry that RAM cannot hold to the cold tier or the sink; whether they took it."""
        plan = Plan(prompt_tokens=len(tokens), ram_tokens=len(tokens))
        if isinstance(self._spill, SyncSpill):
            return self._contained(space, self._spill.spill_sync, tokens, caches, space.name)
        if not self.has_refuge:
            return False
        copies = materialise(caches)
        lease = PromptLease(
            tokens.copy(),
            lambda: copies,
            namespace=space.name,
            plan=plan,
            on_release=lambda lease: None,
        )
        if self._cold is not None:
            return self._cold.begin_unshelved(lease)
        assert isinstance(self._spill, OwnedSpill)
        if self._contained(space, self._spill.spill_owned, lease, space.name):
            return True
        lease.release()
        return False

    def _clear(self, target: int, needed: int) -> None:
        holdings, self._is_making = self._holdings, True
        try:
            self._evict_until(lambda: self._fits(target, needed, holdings.reclaimable_bytes))
            holdings.compact_until(lambda: self._fits(target, needed, 0))
        finally:
            self._is_making = False

    def _evict_until(self, enough: Callable[[], bool]) -> None:
        again = True
        while again and not enough():
            self._look_through(enough)
            again = self._writes is not None and self._writes.drain()

    def _look_through(self, enough: Callable[[], bool]) -> None:
        """Let leaves go in their turn. What the cold tier does not take now is passed over, and
        looked at again, in the order in which that happened, once it takes more.
        """
        with closing(self._queue.victims()) as victims:
            for node in victims:
                if enough():
                    return
                if not self._let_go(self._space(node), node):
                    self._queue.set_aside(node)
        with closing(self._queue.aside()) as passed_over:
            for node in passed_over:
                if enough() or not self._let_go(self._space(node), node):
                    return

    def _let_go(self, space: Space, node: Node, *, only_if_kept: bool = False) -> bool:
        """Evict a leaf, unless the cold tier has to cover it first: then start that. Whether the
        leaf went, or is on its way.

        With `only_if_kept` nothing goes that nobody took.
        """
        tier = self._cold
        lacks = tier is not None and space.usable_at(node) and not tier.is_durable(node)
        if tier is not None and lacks and not tier.is_refused(node):
            if not tier.is_writing(node):
                if not tier.begin(space, node):
                    return False
                space.counts["spills"] += 1
            return True
        covered = self._writes is not None and self._writes.is_durable(node)
        kept = self._spilled(space, node) or covered
        if only_if_kept and not kept:
            return False
        space.counts["demotions"] += kept
        self.demotions += kept
        self._evict(space, node, Demoted if kept else Evicted)
        return True

    def _evict(
        self, space: Space, node: Node, event: type[Demoted] | type[Evicted] = Evicted
    ) -> None:
        parent, size = node.parent, resident_bytes([node])
        name = str(space.tree.name(node)) if self._reporter.is_heard else ""
        self._forgotten.add(space.name, space.tree.tokens_of(node), node.start)
        space.tree.remove(node)
        self._holdings.vacate(node, parent)
        if self._writes is not None:
            self._writes.left(node)
        space.counts["evictions"] += 1
        self._reporter.emit(
            lambda now: event(
                time=now, entry=name, namespace=space.name, tokens=len(node), bytes=size
            )
        )

    def _drop_checkpoint(self, space: Space, node: Node) -> None:
        """Let a checkpoint go; the cold tier gets it first, as far as it takes more writes."""
        tier = self._cold
        if tier is not None and not tier.is_durable(node) and space.usable_at(node):
            space.counts["spills"] += tier.begin(space, node)
        space.counts["checkpoints_dropped"] += 1
        self._holdings.drop_checkpoint(node)
        self._prune(space, node)

    def _prune(self, space: Space, node: Node) -> None:
        """Remove a leaf that serves no length any more, and what that leaves useless above it."""
        layout = space.layout
        while layout is not None and layout.has_state and node.is_held_leaf:
            parent = node.parent
            if node.checkpoint is not None or parent is None or node.tree.is_pinned(node):
                return
            self._evict(space, node)
            node = parent

    def _spilled(self, space: Space, node: Node) -> bool:
        """Whether a sink took what a leaf holds; a failing sink changes nothing."""
        spill = self._spill
        if spill is None or not space.usable_at(node):
            return False
        plan = Plan(prompt_tokens=node.stop, ram_tokens=node.stop)
        lease = self._lender.lend(space, node, plan)
        if isinstance(spill, SyncSpill):
            taken = self._contained(space, spill.spill_sync, lease.tokens, lease.caches, space.name)
            lease.release()
            return taken
        # The node leaves now; what the sink owns stays charged until it lets go.
        self._lender.detach(lease)
        taken = self._contained(space, spill.spill_owned, lease, space.name)
        if not taken:
            lease.release()
        return taken

    def _contained(self, space: Space, sink: Callable[..., None], *given: Any) -> bool:
        """Call a sink; whether it took what it was given."""
        self.is_spilling = True
        try:
            sink(*given)
        except Exception:
            _log.exception("a spill sink failed in namespace %r", space.name)
            space.counts["spill_failures"] += 1
            return False
        finally:
            self.is_spilling = False
        space.counts["spills"] += 1
        return True

    @property
    def _cold(self) -> ColdWrites | None:
        return self._writes if self._writes is not None and self._writes.is_available else None

    def _fits(self, target: int, needed: int, reclaimable: int) -> bool:
        """Whether what would stay is within `target`, and the ledger has `needed` bytes."""
        gone = reclaimable + self._lender.departing_bytes
        stays = self._holdings.total_bytes - gone
        return stays <= target and self._holdings.allowed_bytes + gone >= needed

    def _most_going(self) -> int:
        """No more bytes than these can go: those that nobody reads but who saves them."""
        saved = self._writes.pending_bytes if self._writes is not None else 0
        return self._holdings.unread_bytes + self._lender.departing_bytes + saved

    def _space(self, node: Node) -> Space:
        return self._spaces[node.tree.namespace]

    def _trim_pool(self) -> None:
        if mx.get_cache_memory() > self.max_bytes // POOL_SHARE:
            mx.clear_cache()
