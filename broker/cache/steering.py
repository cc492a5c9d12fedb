"""What callers say of the future: what is to be kept, and what will be needed again."""

from ..errors import CacheError
from .intake import Intake
from .lease import Lender, PromptLease
from .ledger import format_bytes
from .node import Node
from .prefix_hash import Tokens, TokenSource
from .space import Space, resident_bytes


class Steering:
    """Marks nodes of the namespaces `spaces`; at most `limit` bytes are pinned at a time."""

    def __init__(
        self, spaces: dict[str, Space], intake: Intake, lender: Lender, limit: int
    ) -> None:
        self._spaces = spaces
        self._intake = intake
        self._lender = lender
        self._limit = limit

    def pin(self, space: Space, wanted: Tokens, ttl: float) -> int:
        """Keep what is stored of a prompt for a time; see `PromptCache.pin`."""
        node = self._usable(space, wanted)
        if node is None:
            return 0
        pinned = {*node.path()}.union(*(each.tree.pinned_nodes() for each in self._spaces.values()))
        size = resident_bytes(pinned)
        if size > self._limit:
            raise CacheError(
                f"{format_bytes(size)} would be pinned; the limit is {format_bytes(self._limit)}"
            )
        space.tree.pin(node, ttl)
        return node.stop

    def unpin(self, space: Space, tokens: TokenSource) -> int:
        """Let a pin end; see `PromptCache.unpin`."""
        node = space.tree.find(tokens)
        if node is None or not space.tree.is_pinned(node):
            return 0
        space.tree.unpin(node)
        return node.stop

    def unpin_all(self) -> bool:
        """Let all pins end; whether there were any."""
        trees = [space.tree for space in self._spaces.values()]
        pinned = [(tree, node) for tree in trees for node in tree.pinned_nodes()]
        for tree, node in pinned:
            tree.unpin(node)
        return bool(pinned)

    def prioritise(self, space: Space, wanted: Tokens, priority: int) -> int:
        """Let what is stored of a prompt leave later; see `PromptCache.prioritise`."""
        node = self._usable(space, wanted)
        if node is None:
            return 0
        space.tree.prioritise(node, priority)
        return node.stop

    def next_use(
        self, space: Space, target: TokenSource | PromptLease, eta: float, instead: bool
    ) -> None:
        """Expect a use of a prompt or a lease's sequence; see `PromptCache.next_use`."""
        if isinstance(target, PromptLease):
            node = self._lender.node_of(target)
        else:
            path = space.tree.walk(target).path
            node = path[-1] if path else None
        if node is not None:
            node.tree.expect(node, eta, instead=instead)

    def _usable(self, space: Space, wanted: Tokens) -> Node | None:
        """The node that ends where the usable part of a prompt does, split there if need be."""
        match = space.match(wanted, len(wanted))
        return self._intake.boundary(space, match.walk, match.length) if match.length else None
