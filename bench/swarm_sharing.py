"""Where sharing pays: a step with spans read together, against the same tokens in every tail.

The rule's limits, how short a span may be and how many there may be, are set from this.
"""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from bench.runner import compare
from bench.swarm_decode import prefix_path, shared_steps, tail_lengths
from bench.swarm_findings import Sharing
from bench.swarm_setup import Setup, settle


class SharingSizes(NamedTuple):
    """Spans, in tokens, by rows that read one together; and groups with a span each, of
    `group_rows` rows in all.
    """

    rows: tuple[int, ...]
    spans: tuple[int, ...]
    groups: tuple[int, ...]
    group_rows: int
    group_spans: tuple[int, ...]
    tail: int = 128
    steps: int = 24
    repeats: int = 3


def sharing(setup: Setup, sizes: SharingSizes) -> Iterator[Sharing]:
    """Every cell in turns of its own: one span for all rows, then groups."""
    cells = [(rows, 1, span) for rows, span in product(sizes.rows, sizes.spans)]
    cells += [
        (sizes.group_rows, groups, span)
        for groups, span in product(sizes.groups, sizes.group_spans)
        if groups <= sizes.group_rows
    ]
    for rows, groups, span in cells:
        if rows * setup.kv_bytes(span + 2 * sizes.tail) <= setup.copies:
            yield _cell(setup, sizes, rows, groups, span)
            settle()


def _cell(setup: Setup, sizes: SharingSizes, rows: int, groups: int, span: int) -> Sharing:
    tails = tail_lengths(rows, sizes.tail)
    paths = [prefix_path(setup, span) for _ in range(groups)]
    shared = [paths[row * groups // rows] for row in range(rows)]
    copied = [tail + span for tail in tails]
    compared = compare(
        f"{rows} rows in {groups} groups over {span} tokens",
        {
            "shared": shared_steps(setup, shared, tails, sizes.steps, max_spans=groups),
            "copied": shared_steps(setup, [[]] * rows, copied, sizes.steps),
        },
        unit="ms",
        repeats=sizes.repeats,
    )
    return Sharing(rows=rows, groups=groups, span=span, comparison=compared)
