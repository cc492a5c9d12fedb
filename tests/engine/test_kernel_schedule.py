"""The kernels' tables, carried out in numpy: every row must end up with its whole context."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_swarm.broker.engine.kernels.schedule import (
    MIN_CHUNK,
    Segment,
    Tables,
    Tiling,
    build_tables,
    split_tails,
)

ROWS = 12


@st.composite
def segments(draw: st.DrawFn) -> list[Segment]:
    found = []
    for source in range(1, draw(st.integers(0, 5)) + 1):
        rows = sorted(draw(st.sets(st.integers(0, ROWS - 1), min_size=1)))
        begin = draw(st.integers(0, 300))
        end = begin + draw(st.integers(1, 5000))
        found.append(Segment(source, 0, rows, begin, end, draw(st.integers(0, 100))))
    return found


tilings = st.builds(
    Tiling,
    rows=st.sampled_from((64, 128)),
    keys=st.sampled_from((32, 64, 128)),
    blocks=st.integers(1, 132),
    ratio=st.integers(1, 9),
)


@settings(max_examples=40, deadline=None)
@given(segments(), tilings)
def test_every_row_and_key_is_computed_once(parts: list[Segment], tiling: Tiling) -> None:
    tables = build_tables(parts, ROWS, tiling)
    seen = _carried_out(tables, tiling)
    wanted = {
        (row, head, part.source, key)
        for part in parts
        for row in part.rows
        for head in range(tiling.ratio)
        for key in (part.begin, part.end - 1)
    }
    assert wanted <= seen.keys()
    total = sum(len(p.rows) * tiling.ratio * (p.end - p.begin) for p in parts)
    assert sum(count for count, _ in seen.values()) == total


@settings(max_examples=40, deadline=None)
@given(segments(), tilings)
def test_partials_of_a_row_are_written_once_each_and_lie_together(
    parts: list[Segment], tiling: Tiling
) -> None:
    tables = build_tables(parts, ROWS, tiling)
    written: dict[int, set[int]] = {row: set() for row in range(ROWS)}
    for item in tables.work:
        for folded in range(item[3], item[4]):
            row, partial, _ = tables.members[item[2] + folded // tiling.ratio]
            written[row].add(partial + item[7])
    for row in range(ROWS):
        begin, end = tables.partial_begins[row], tables.partial_begins[row + 1]
        assert written[row] == set(range(begin, end))


@given(segments(), tilings)
def test_blocks_fit_one_wave_where_rows_allow(parts: list[Segment], tiling: Tiling) -> None:
    tables = build_tables(parts, ROWS, tiling)
    least = sum(-(-len(p.rows) * tiling.ratio // tiling.rows) for p in parts)
    waves = max(1, -(-least // tiling.blocks))
    assert len(tables.work) <= waves * tiling.blocks
    for item in tables.work:
        assert item[5] < item[6]


def test_eight_thousand_keys_for_64_rows_fill_the_gpu_once() -> None:
    tiling = Tiling(rows=128, keys=128, blocks=132 // 8, ratio=4)
    tables = build_tables([Segment(1, 0, range(64), 0, 8192)], 64, tiling)
    assert len(tables.work) == 16
    assert tables.partials == 64 * 8


def test_windows_give_each_row_its_first_key() -> None:
    tiling = Tiling(rows=64, keys=128, blocks=16, ratio=1)
    positions = [1000, 1000]
    tables = build_tables(
        [Segment(1, 0, (0, 1), 0, 900, 100)], 2, tiling, window=256, positions=positions
    )
    lengths = np.array([10, 30])
    first = lengths[tables.members[:, 0]] - tables.members[:, 2]
    assert first.tolist() == [1000 + 10 - 256 - 100, 1000 + 30 - 256 - 100]


def test_long_tails_leave_a_short_end_for_the_tail_kernel() -> None:
    parts, begins = split_tails([5000, 40, 5000], [0, 0, 100], [3, 4, 5], [0, 0, 0])
    assert [(part.source, part.slot, tuple(part.rows)) for part in parts] == [
        (0, 3, (0,)),
        (0, 5, (2,)),
    ]
    assert begins[1] == 0
    for part, row in zip(parts, (0, 2), strict=True):
        assert part.end == begins[row]
        assert 5000 - begins[row] < MIN_CHUNK


def test_tokens_of_one_prompt_attend_together_to_what_lies_before_their_block() -> None:
    lengths = [*range(301, 601), 40]
    parts, begins = split_tails(lengths, [0] * 301, [7] * 300 + [9], [50] * 301)
    assert [(part.slot, part.begin, part.end, part.position) for part in parts] == [
        (7, 0, 300, 50),
        (7, 0, 428, 50),
        (7, 0, 556, 50),
    ]
    assert [row for part in parts for row in part.rows] == list(range(300))
    assert begins == [300] * 128 + [428] * 128 + [556] * 44 + [0]


def test_a_window_hides_the_first_tokens_of_a_tail() -> None:
    parts, begins = split_tails([*range(301, 401)], [0] * 100, [7] * 100, [0] * 100, window=150)
    assert [(part.begin, part.end) for part in parts] == [(151, 300)]
    assert begins == [300] * 100


def _carried_out(
    tables: Tables, tiling: Tiling
) -> dict[tuple[int, int, int, int], tuple[int, int]]:
    """(row, head, source, first or last key) of what the blocks compute, with the keys counted
    under the first one of each block."""
    seen: dict[tuple[int, int, int, int], tuple[int, int]] = {}
    for source, _, first_member, begin, end, key_begin, key_end, chunk in tables.work.tolist():
        for folded in range(begin, end):
            row = int(tables.members[first_member + folded // tiling.ratio][0])
            place = (row, folded % tiling.ratio, source)
            assert (*place, key_begin) not in seen
            seen[(*place, key_end - 1)] = (0, chunk)
            seen[(*place, key_begin)] = (key_end - key_begin, chunk)
    return seen
