"""Sets of token positions as runs: disjoint, ascending, half-open intervals. No MLX."""

from collections.abc import Iterable

Runs = tuple[tuple[int, int], ...]


def clean_runs(runs: Iterable[tuple[int, int]]) -> Runs:
    """Sort intervals, drop empty ones, join those that touch or overlap."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(run for run in runs if run[0] < run[1]):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return tuple(result)


def intersect_runs(left: Runs, right: Runs) -> Runs:
    """The positions in both."""
    return clean_runs((max(a, c), min(b, d)) for a, b in left for c, d in right)


def without_runs(left: Runs, right: Runs) -> Runs:
    """The positions of `left` that are not in `right`."""
    bounds = [0, *(at for run in right for at in run), 1 << 62]
    return intersect_runs(left, clean_runs(zip(bounds[::2], bounds[1::2], strict=True)))


def count_runs(runs: Runs) -> int:
    """How many positions there are."""
    return sum(stop - start for start, stop in runs)


def show_runs(runs: Runs) -> str:
    """For error messages: `[0, 4) [90, 128)`, or `none`."""
    return " ".join(f"[{start}, {stop})" for start, stop in runs) or "none"


def window_length(held: Runs, span: int, keep: int, length: int) -> int:
    """The greatest n <= `length` whose first `keep` and last `span` positions before n are held.

    `span` 0 stands for all positions. 0 is always one.
    """
    first = held[0][1] if held and held[0][0] == 0 else 0
    for start, stop in reversed(held):
        usable = min(stop, length)
        oldest = max(min(keep, usable), usable - span) if span else 0
        # Within a run the greatest length is the one that needs least before the run.
        if usable > start and oldest >= start and (first >= keep or start == 0):
            return usable
    return 0
