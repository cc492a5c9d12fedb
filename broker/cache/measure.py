"""Measuring a cache: bytes per namespace and what keeps them from being evicted."""

from collections.abc import Callable

import msgspec

from .extents import ExtentRange
from .holdings import Holdings
from .lease import Lender
from .node import Node
from .space import Space, resident_bytes
from .statistics import NamespaceStatistics


def measure(
    space: Space,
    holdings: Holdings,
    lender: Lender,
    is_durable: Callable[[Node], bool] | None,
) -> NamespaceStatistics:
    """The statistics of one namespace; takes time in proportion to its nodes.

    `is_durable` tells what the cold tier covers; None where there is none.
    """
    nodes = list(space.tree.nodes())
    extents = holdings.extents(space.name)
    lacking = [node for node in nodes if is_durable is not None and not is_durable(node)]
    undurable = {above for node in lacking for above in node.path()}
    return msgspec.structs.replace(
        space.statistics(),
        extent_bytes=sum(extent.nbytes for extent in extents),
        checkpoint_bytes=sum(n.checkpoint.nbytes for n in nodes if n.checkpoint is not None),
        slack_bytes=sum(holdings.slack_of(extent) for extent in extents),
        leased_bytes=_leased_bytes(space, holdings, lender),
        pinned_bytes=resident_bytes(space.tree.pinned_nodes()),
        undurable_bytes=resident_bytes(undurable),
    )


def _leased_bytes(space: Space, holdings: Holdings, lender: Lender) -> int:
    """Extents that clones read, in full: nothing of them can be given back before their release.

    To them come the nodes above a lease that got other extents since.
    """
    total = sum(e.nbytes for e in holdings.extents(space.name) if holdings.is_lent(e))
    for node in lender.nodes():
        if node.tree is space.tree:
            total += node.checkpoint.nbytes if node.checkpoint is not None else 0
            if isinstance(node.span, ExtentRange) and not holdings.is_lent(node.span.extent):
                total += node.span.nbytes
    return total
