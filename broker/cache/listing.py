"""What a namespace holds, for people: its entries, the last used first. No MLX."""

import heapq

from msgspec import Struct

from .node import Node, NodeState
from .space import Space, resident_bytes

TIERS = {
    NodeState.PENDING: "pending",
    NodeState.LIVE: "pending",
    NodeState.RESIDENT: "ram",
    NodeState.COLD: "cold",
}


class ListedEntry(Struct, frozen=True, kw_only=True):
    """A sequence that was stored.

    `own_tokens` and `own_bytes` are those that it shares with no longer beginning of another one;
    `bytes` are all on its path. The first `pinned_tokens` stay for now.
    `tier` is `ram`, `cold`, or `pending` while it is computed.
    """

    name: str
    tokens: int
    own_tokens: int
    bytes: int
    own_bytes: int
    tier: str
    hits: int
    leases: int
    pinned_tokens: int
    idle_seconds: float


class Listing(Struct, frozen=True, kw_only=True):
    """A page of entries, and how many there are."""

    total: int
    entries: tuple[ListedEntry, ...]


def listing(space: Space, offset: int, limit: int) -> Listing:
    """So many entries of a namespace from `offset` on, the last used first.

    Takes time in proportion to all of them.
    """
    entries = [node for node in space.tree.nodes() if node.is_entry]
    latest = heapq.nlargest(offset + limit, entries, key=lambda node: node.last_used)
    pinned, now = space.tree.pinned_nodes(), space.tree.clock()
    return Listing(
        total=len(entries),
        entries=tuple(_listed(space, node, pinned, now) for node in latest[offset:]),
    )


def _listed(space: Space, node: Node, pinned: set[Node], now: float) -> ListedEntry:
    path = node.path()
    return ListedEntry(
        name=str(space.tree.name(node)),
        tokens=node.stop,
        own_tokens=len(node),
        bytes=resident_bytes(path),
        own_bytes=resident_bytes([node]),
        tier=TIERS[node.state],
        hits=node.hits,
        leases=node.leases,
        pinned_tokens=max((each.stop for each in path if each in pinned), default=0),
        idle_seconds=now - node.last_used,
    )
