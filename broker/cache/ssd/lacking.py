"""What of a write the store lacks, and on which file it hangs."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..layout import Layout
from ..prefix_hash import Tokens
from ..runs import Runs, intersect_runs, without_runs
from .header import Header
from .index import Index
from .names import file_key, namespace_key
from .pieces import Piece, Pieces, Rows
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


class Lacking(NamedTuple):
    """What of a write is not stored: all from `start` on, below the end of a chain.

    `start` is None if nothing is lacking, and the length of the write if only the checkpoint is.
    """

    chain: Chain
    start: int | None


def lacking_of(
    index: Index, namespace: str, tokens: Tokens, layout: Layout, offered: Sequence[Held]
) -> Lacking:
    """What has to be written so that the store has all that is offered of `tokens`."""
    chains = [c for c in index.chains(namespace_key(namespace), tokens) if c.layout == layout]
    found = [Lacking(chain, _first_lacking(chain, offered, len(tokens))) for chain in chains]
    nothing = Lacking(Chain(layout, (), {}), 0)
    return max(found, key=lambda each: (each.start is None, each.start), default=nothing)


def _first_lacking(chain: Chain, offered: Sequence[Held], length: int) -> int | None:
    # A node may hold more of the window layers than the files that have its tokens.
    groups = range(len(chain.layout.groups)) if chain.layout.has_windows else ()
    known = ((0, chain.stop),)
    for part in offered:
        for group in groups:
            if without_runs(intersect_runs(part.runs(group), known), chain.runs(group)):
                return part.start
        if part.stop > chain.stop:
            return max(part.start, chain.stop)
    if chain.stop < length:
        return chain.stop
    return None if chain.usable(length) == length else length


def files_of(
    lacking: Lacking, pieces: Pieces, namespace: str, tokens: Tokens, model: str
) -> list[tuple[Header, Sequence[Rows]]]:
    """The files that make up for what is lacking, in order, with their rows."""
    chain, start = lacking
    if start is None:
        return []
    length = len(tokens)
    files: list[tuple[Header, Sequence[Rows]]] = []
    parent = next((link.record.key for link in chain.links if link.start < start <= link.stop), "")
    parent = parent or namespace_key(namespace)
    parts = [piece.after(start) for piece in pieces.pieces if piece.stop > start]
    if not parts and pieces.has_checkpoint:
        parts = [Piece(length, length, ((),) * len(pieces.layout.groups), ())]
    for low, high, held, rows in parts:
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
            model=model,
        )
        files.append((header, (*rows, *(pieces.state if is_last else ()))))
        parent = header.key
    return files
