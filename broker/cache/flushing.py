"""Writing down all that only RAM has, and saying what could not be."""

import time
from collections.abc import Iterable, Iterator

from .cold import ColdStore, Flushed
from .node import Node, NodeState
from .space import Space, resident_bytes
from .writes import ColdWrites


def flush(
    spaces: Iterable[Space], writes: ColdWrites | None, store: ColdStore | None, timeout: float
) -> Flushed:
    """Write every usable length that the store lacks; what is left after `timeout` seconds."""
    deadline, todo = time.monotonic() + timeout, list(spaces)
    is_moving = writes is not None
    begun: set[Node] = set()
    stored: set[Node] = set()
    while is_moving and time.monotonic() < deadline:
        assert writes is not None
        assert store is not None
        writes.drain()
        # What the store has let go of since has no room there: writing it again would go on for
        # ever.
        stored.update(filter(writes.was_stored, begun))
        now = _begin(todo, writes, stored)
        begun |= now
        is_moving = bool(now) or writes.pending_bytes > 0
        if is_moving:
            store.flush(max(0.0, deadline - time.monotonic()))
    if writes is not None:
        writes.drain()
    left = {node for space in todo for node in _lacking(space, writes)}
    return Flushed(len(left), resident_bytes(left))


def _begin(spaces: Iterable[Space], writes: ColdWrites, stored: set[Node]) -> set[Node]:
    """Begin as many writes as the store takes; the nodes whose KV or checkpoint they write."""
    begun: set[Node] = set()
    for space in spaces:
        on_the_way: set[Node] = set()
        lacking = list(_lacking(space, writes))
        # A checkpoint shares a file with its node if that is written before those below it.
        marked = [node for node in reversed(lacking) if node.checkpoint is not None]
        for node in [*marked, *(node for node in lacking if node.checkpoint is None)]:
            # Writing the end of a path writes all of it, but for the checkpoints on the way.
            done = node in on_the_way and node.checkpoint is None
            if done or node in stored or writes.is_writing(node) or writes.is_refused(node):
                continue
            if writes.is_available and writes.begin(space, node):
                on_the_way.update(node.path())
                space.counts["spills"] += 1
        begun |= on_the_way
    return begun


def _lacking(space: Space, writes: ColdWrites | None) -> Iterator[Node]:
    """The nodes at whose end a sequence can be taken now but not restored, leaves first."""
    for node in space.tree.leaves_first():
        is_held = node.state is NodeState.RESIDENT and node.parent is not None
        if is_held and space.usable_at(node) and not (writes and writes.is_durable(node)):
            yield node
