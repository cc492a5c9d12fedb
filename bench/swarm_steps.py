"""Decode steps of N rows over a shared prefix, in units of the stock step of N rows without any.

Everything of one N is measured in turns, so that all its ratios are over the same stock steps.
"""

from collections.abc import Iterator
from typing import NamedTuple

from bench.attention import DEVIATIONS
from bench.attention_cases import Case, attend, error_floor, errors, make
from bench.runner import compare
from bench.swarm_decode import (
    Measure,
    plain_steps,
    prefix_path,
    replicated_steps,
    shared_steps,
    stock_steps,
    tail_lengths,
)
from bench.swarm_findings import STOCK, Accuracy, Steps, step_name
from bench.swarm_setup import Setup, settle
from mlx_swarm.broker.engine.shared_attention import Group

REPLICATED_STEPS = 4


class StepSizes(NamedTuple):
    """A grid of rows and shared tokens, tails of `tail` tokens on the mean, `steps` timed ones.

    `plain` and `replicated` are the cells to measure with plain operations and with mlx-lm's batch
    cache as well; the latter only where copies may take so much.
    """

    rows: tuple[int, ...]
    prefixes: tuple[int, ...]
    plain: tuple[tuple[int, int], ...] = ()
    replicated: tuple[tuple[int, int], ...] = ()
    tail: int = 128
    steps: int = 24
    repeats: int = 5


def steps(setup: Setup, sizes: StepSizes) -> Iterator[Accuracy | Steps]:
    """The accuracy of the attention that serves, then the grid, by rows."""
    yield accuracy(setup, max(sizes.prefixes))
    paths = {shared: prefix_path(setup, shared) for shared in sizes.prefixes}
    for rows in sizes.rows:
        tails = tail_lengths(rows, sizes.tail)
        contenders: dict[str, Measure] = {}
        for shared, path in paths.items():
            name, each = step_name("shared", shared), [path] * rows
            contenders[name] = shared_steps(setup, each, tails, sizes.steps)
            if (rows, shared) in sizes.plain and setup.attention.startswith("kernel"):
                name = step_name("plain", shared)
                contenders[name] = plain_steps(setup, each, tails, sizes.steps)
            if (rows, shared) in sizes.replicated and _fits(setup, sizes, rows, shared):
                count = min(REPLICATED_STEPS, sizes.steps)
                name = step_name("mlx-lm", shared)
                contenders[name] = replicated_steps(setup, shared, tails, count)
        contenders[STOCK] = stock_steps(setup, rows, sizes.tail, sizes.steps)
        name = f"decode step, {rows} rows"
        compared = compare(name, contenders, unit="ms", repeats=sizes.repeats)
        yield Steps(rows=rows, tail=sizes.tail, prefixes=sizes.prefixes, comparison=compared)
        settle()


def accuracy(setup: Setup, shared: int) -> Accuracy:
    """The worst of eight ragged rows over a prefix, most with a second span."""
    lengths = [130, 5, 77, 200, 1, 64, 150, 128]
    length = max(16, min(shared, 8192))
    groups = [Group(range(7), length), Group((0, 1, 2), length // 8, length)]
    ours, stock = [], []
    for deviation in DEVIATIONS:
        layer = make(Case(setup.geometry, groups, lengths, deviation=float(deviation)))
        found = errors(layer, attend(layer, "what serves"), list(range(len(lengths))))
        ours.append(found[0])
        stock.append(found[1])
    return Accuracy(
        served=setup.attention,
        deviations=tuple(map(float, DEVIATIONS)),
        ours=tuple(ours),
        stock=tuple(stock),
        floor=error_floor(setup.geometry.dtype),
    )


def _fits(setup: Setup, sizes: StepSizes, rows: int, shared: int) -> bool:
    return rows * setup.kv_bytes(shared + 2 * sizes.tail) <= setup.copies
