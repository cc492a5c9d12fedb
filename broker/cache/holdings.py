"""Every byte of KV that the cache keeps alive, counted once, and who keeps it."""

import logging
from collections import OrderedDict
from collections.abc import Callable

from .extents import Extent, ExtentRange, compact
from .kinds import Checkpoint
from .ledger import Ledger, Purpose, Reservation
from .logprobs import Logprobs
from .node import Node

Hook = Callable[[], None]

UNLIMITED = 1 << 62
"""Bytes that a cache without a ledger may take."""

_log = logging.getLogger(__name__)


class Holdings:
    """Extents and checkpoints of all namespaces: exact bytes, slack, compaction, release hooks.

    A node's span is set and dropped here, so that the totals are right after every call.
    """

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.extent_bytes = 0
        self.checkpoint_bytes = 0
        self.reclaimable_bytes = 0
        """Slack that compaction can give back now: that of extents which no clone reads."""
        self.checkpoints: OrderedDict[Node, int] = OrderedDict()
        """Nodes with a checkpoint and its bytes, least recently used first."""
        self._ledger = ledger or Ledger(UNLIMITED)
        self._extents: dict[Extent, str] = {}
        self._lowest: dict[Extent, Node] = {}
        self._slack: dict[Extent, int] = {}
        self._hooks: dict[Extent, list[_SharedHook]] = {}
        self._leased: dict[Extent, int] = {}

    @property
    def total_bytes(self) -> int:
        """Bytes of all extents, slack included, and of all checkpoints."""
        return self.extent_bytes + self.checkpoint_bytes

    @property
    def slack_bytes(self) -> int:
        """Bytes of extents that no node and no lease needs."""
        return sum(self._slack.values())

    @property
    def unread_bytes(self) -> int:
        """Bytes that no clone reads: no more than these can go."""
        return self.total_bytes - sum(extent.nbytes for extent in self._leased)

    @property
    def allowed_bytes(self) -> int:
        """What the ledger would let extents take in addition."""
        return self._ledger.available(Purpose.EXTENTS)

    def reserve(self, purpose: Purpose, nbytes: int) -> Reservation:
        """Promise bytes before they are taken. Raises `OutOfMemory` and changes nothing."""
        return self._ledger.reserve(purpose, nbytes)

    def extents(self, namespace: str | None = None) -> list[Extent]:
        """The living extents of a namespace, or all."""
        return [e for e, name in self._extents.items() if namespace in (None, name)]

    def adopt(self, extent: Extent, namespace: str) -> ExtentRange:
        """Take a new extent in; returns the range over all of it, to be put into a node."""
        self._extents[extent] = namespace
        self._charge(Purpose.EXTENTS, extent.nbytes)
        return extent.whole()

    def on_release(self, node: Node, hook: Hook) -> None:
        """Call `hook` once, when neither nodes nor clones need the extent of `node` any more."""
        span = node.span
        assert isinstance(span, ExtentRange)
        self._hooks.setdefault(span.extent, []).append(_SharedHook(hook))

    def settle(self, node: Node) -> None:
        """Note that `node`, whose span is set, is the lowest one over its extent."""
        span = node.span
        assert isinstance(span, ExtentRange)
        self._lowest[span.extent] = node

    def vacate(self, node: Node, parent: Node | None) -> None:
        """A leaf that hung below `parent` has left the tree: release what it holds."""
        span, node.span = node.span, None
        self.drop_checkpoint(node)
        if isinstance(span, ExtentRange):
            self._move_up(span.extent, node, parent)
            self.release(span)

    def replace(self, node: Node, span: ExtentRange) -> None:
        """Give a node another range over the same tokens."""
        old = node.span
        assert isinstance(old, ExtentRange)
        assert len(old) == len(span)
        node.span = span
        self.settle(node)
        self._move_up(old.extent, node, node.parent)
        self.release(old)

    def lend(self, span: ExtentRange) -> ExtentRange:
        """Another reference for a clone, which keeps the extent where it is."""
        if span.extent not in self._leased:
            self.reclaimable_bytes -= self.slack_of(span.extent)
        self._leased[span.extent] = self._leased.get(span.extent, 0) + 1
        return span.retain()

    def give_back(self, span: ExtentRange) -> None:
        """A clone is done with a reference."""
        self._leased[span.extent] -= 1
        if not self._leased[span.extent]:
            del self._leased[span.extent]
            self.reclaimable_bytes += self.slack_of(span.extent)
        self.release(span)

    def slack_of(self, extent: Extent) -> int:
        """Bytes of an extent that no node and no lease needs."""
        return self._slack.get(extent, 0)

    def is_lent(self, extent: Extent) -> bool:
        """Whether a clone reads it."""
        return extent in self._leased

    def release(self, span: ExtentRange) -> None:
        """Drop one reference; the extent goes with the last."""
        extent, size = span.extent, span.extent.nbytes
        if not span.release():
            return
        if extent.is_alive:
            self._set_slack(extent, extent.slack)
            return
        self._charge(Purpose.EXTENTS, -size)
        self._set_slack(extent, 0)
        self._lowest.pop(extent, None)
        del self._extents[extent]
        for hook in self._hooks.pop(extent, ()):
            hook.leave()

    def keep_checkpoint(self, node: Node, checkpoint: Checkpoint) -> None:
        """Attach a checkpoint to the node that ends where it is valid."""
        node.checkpoint = checkpoint
        self.checkpoints[node] = checkpoint.nbytes
        self._charge(Purpose.CHECKPOINTS, checkpoint.nbytes)

    def keep_logprobs(self, node: Node, logprobs: Logprobs) -> None:
        """Attach those of a node's tokens, as far as they are known, to its extent."""
        span = node.span
        assert isinstance(span, ExtentRange)
        extent, size = span.extent, span.extent.nbytes
        extent.keep_logprobs(span.start, logprobs)
        if extent.nbytes > size:
            self._charge(Purpose.EXTENTS, extent.nbytes - size)
            self._set_slack(extent, extent.slack)

    def use_checkpoint(self, node: Node) -> None:
        """A node's checkpoint, if it has one, is the most recently used."""
        if node in self.checkpoints:
            self.checkpoints.move_to_end(node)

    def drop_checkpoint(self, node: Node) -> None:
        """Let a node's checkpoint go, if it has one."""
        size = self.checkpoints.pop(node, None)
        node.checkpoint = None
        if size is not None:
            self._charge(Purpose.CHECKPOINTS, -size)

    def compact_until(self, enough: Callable[[], bool]) -> None:
        """Copy the live parts of partly dead extents, the emptiest first, until `enough()`."""
        for extent in sorted(self._slack, key=lambda each: -self._slack[each]):
            if enough():
                return
            if extent not in self._leased and self._slack.get(extent):
                self._compact(extent)

    def check_integrity(self, nodes: list[Node], lent: list[ExtentRange]) -> None:
        """Assert that the totals are those of all nodes and all lent ranges, which are given."""
        spans = [node.span for node in nodes if node.span is not None]
        references: dict[Extent, int] = {}
        for span in [*spans, *lent]:
            assert isinstance(span, ExtentRange)
            references[span.extent] = references.get(span.extent, 0) + 1
        assert references.keys() == self._extents.keys()
        for extent, count in references.items():
            extent.check_integrity()
            assert extent.references == count, (extent.references, count)
            assert self._slack.get(extent, 0) == extent.slack
        reclaimable = (n for extent, n in self._slack.items() if extent not in self._leased)
        assert self.reclaimable_bytes == sum(reclaimable)
        assert self.extent_bytes == sum(extent.nbytes for extent in references)
        held = {node: node.checkpoint.nbytes for node in nodes if node.checkpoint is not None}
        assert held == dict(self.checkpoints)
        assert self.checkpoint_bytes == sum(held.values())
        assert self._leased.keys() == {span.extent for span in lent}

    def _set_slack(self, extent: Extent, size: int) -> None:
        if extent not in self._leased:
            self.reclaimable_bytes += size - self.slack_of(extent)
        if size:
            self._slack[extent] = size
        else:
            self._slack.pop(extent, None)

    def _compact(self, extent: Extent) -> None:
        """Move what nodes hold of an extent into new ones; runs of adjacent nodes stay together."""
        for nodes in self._holders(extent):
            for node, span in zip(nodes, self._copied(nodes, extent), strict=True):
                self.replace(node, span)

    def _copied(self, nodes: list[Node], extent: Extent) -> list[ExtentRange]:
        # `compact` releases what it is given; the nodes keep theirs until they are replaced.
        spans = [node.span.retain() for node in nodes if isinstance(node.span, ExtentRange)]
        try:
            fresh = compact(spans)
        except BaseException:
            for span in spans:
                span.release()
            raise
        self._extents[fresh[0].extent] = self._extents[extent]
        self._charge(Purpose.EXTENTS, fresh[0].extent.nbytes)
        if extent in self._hooks:
            self._hooks[fresh[0].extent] = [hook.join() for hook in self._hooks[extent]]
        return fresh

    def _holders(self, extent: Extent) -> list[list[Node]]:
        """The nodes over an extent, top down, in runs without a gap. They all lie on one path."""
        runs: list[list[Node]] = []
        node = self._lowest.get(extent)
        below = None
        while node is not None and node.parent is not None and node.stop > extent.start:
            if isinstance(node.span, ExtentRange) and node.span.extent is extent:
                if below is not None and runs:
                    runs[-1].insert(0, node)
                else:
                    runs.append([node])
                below = node
            else:
                below = None
            node = node.parent
        return runs

    def _move_up(self, extent: Extent, node: Node, parent: Node | None) -> None:
        """`node` no longer holds an extent: if it was the lowest, find the next one above."""
        if self._lowest.get(extent) is not node:
            return
        del self._lowest[extent]
        while parent is not None and parent.stop > extent.start:
            if isinstance(parent.span, ExtentRange) and parent.span.extent is extent:
                self._lowest[extent] = parent
                return
            parent = parent.parent

    def _charge(self, purpose: Purpose, size: int) -> None:
        if purpose is Purpose.EXTENTS:
            self.extent_bytes += size
        else:
            self.checkpoint_bytes += size
        if size > 0:
            self._ledger.charge(purpose, size)
        else:
            self._ledger.release(purpose, -size)


class _SharedHook:
    """A release hook of several extents: it runs once, when the last of them is gone."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        self._users = 1

    def join(self) -> "_SharedHook":
        self._users += 1
        return self

    def leave(self) -> None:
        self._users -= 1
        if self._users:
            return
        try:
            self._hook()
        except Exception:
            _log.exception("the release hook of a restored entry failed")
