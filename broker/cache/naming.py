"""Names of nodes outside the process: a sha256 chain over pages, kept with the nodes. No MLX."""

import numpy as np

from .node import Node
from .prefix_hash import PAGE_TOKENS, EntryName, Tokens, entry_name, page_hashes, sha256_digest


def name_of(node: Node) -> EntryName:
    """The name of the sequence that ends at `node`; the root's digest starts the chain."""
    digest, rest = page_digest(node), _after_last_page(node)
    return entry_name(rest, digest, node.stop - len(rest))


def page_digest(node: Node) -> bytes:
    """The chained digest at the last page boundary up to the node's end; hashed once, then kept."""
    todo = []
    while node.page_digest is None:
        todo.append(node)
        assert node.parent is not None
        node = node.parent
    digest = node.page_digest
    for node in reversed(todo):
        digest = (_own_chain(node) or [digest])[-1]
        node.page_digest = digest
    return digest


def own_page_digests(node: Node) -> list[bytes]:
    """The chained digests of the pages that end inside `node`; empty if none does."""
    if node.parent is None:
        return []
    page_digest(node.parent)
    chain = _own_chain(node)
    if chain:
        node.page_digest = chain[-1]
    return chain


def _own_chain(node: Node) -> list[bytes]:
    parent = node.parent
    assert parent is not None
    assert parent.page_digest is not None
    tokens = np.concatenate([_after_last_page(parent), node.tokens])
    return page_hashes(tokens, parent.page_digest, sha256_digest)


def _after_last_page(node: Node) -> Tokens:
    """The up to 63 tokens between the last page boundary and the node's end."""
    need = node.stop % PAGE_TOKENS
    parts: list[Tokens] = []
    while need:
        part = node.tokens[max(0, len(node) - need) :]
        parts.append(part)
        need -= len(part)
        assert node.parent is not None
        node = node.parent
    return np.concatenate(parts[::-1]) if parts else np.empty(0, np.uint32)
