"""What of a write the store lacks, and on which file it hangs."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from ..layout import Layout
from ..prefix_hash import Tokens
from ..runs import Runs, intersect_runs
from .header import Header
from .index import Index
from .names import file_key, namespace_key
from .pieces import Pieces, Rows
from .record import Chain


class Held(Protocol):
    """A run of tokens on offer: a range of an extent, or a piece."""

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    def runs(self, group: int) -> Runs:
        """The positions it holds for a group of the layout."""
        ...


def best_chain(index: Index, namespace: str, tokens: Tokens, layout: Layout) -> Chain:
    """The files that hold most of a sequence already."""
    chains = (c for c in index.chains(namespace_key(namespace), tokens) if c.layout == layout)
    return max(chains, key=lambda chain: chain.stop, default=Chain(layout, (), {}))


def first_lacking(chain: Chain, offered: Iterable[Held], length: int) -> int | None:
    """Where writing has to begin so that `length` can be restored; None if it can be already.

    `length` itself means that only the checkpoint there is lacking.
    """
    if chain.usable(length) == length:
        return None
    layout = chain.layout
    for part in offered:
        if part.stop > chain.stop:
            return max(part.start, chain.stop)
        for index, group in enumerate(layout.groups):
            needed = intersect_runs(part.runs(index), group.retention.needed(length))
            if intersect_runs(needed, chain.runs(index)) != needed:
                return part.start
    return length


def files_of(
    chain: Chain, pieces: Pieces, start: int | None, namespace: str, tokens: Tokens
) -> list[tuple[Header, Sequence[Rows]]]:
    """The files that make up for what is lacking from `start` on, in order, with their rows."""
    if start is None:
        return []
    length = len(tokens)
    files: list[tuple[Header, Sequence[Rows]]] = []
    parent = next((link.record.key for link in chain.links if link.start < start <= link.stop), "")
    parent = parent or namespace_key(namespace)
    lacking = [piece.after(start) for piece in pieces.pieces if piece.stop > start]
    spans = [(piece.start, piece.stop, piece.held, piece.rows) for piece in lacking]
    for low, high, held, rows in spans or [(length, length, ((),) * len(pieces.layout.groups), ())]:
        is_last = high == length and pieces.has_checkpoint
        header = Header(
            key=file_key(namespace, tokens[:high], low),
            parent=parent,
            namespace=namespace_key(namespace),
            start=low,
            stop=high,
            tokens=tokens[low:high].tobytes(),
            layout=pieces.layout,
            runs=held,
            has_checkpoint=is_last,
        )
        files.append((header, (*rows, *(pieces.state if is_last else ()))))
        parent = header.key
    return files
