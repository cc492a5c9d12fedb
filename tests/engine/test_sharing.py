"""What rows of a batch share: cut rightly, bounded, and never a gap on a row's path."""

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from mlx_swarm.broker.engine.sharing import LEAST_SPAN, Piece, share


class Block(NamedTuple):
    """Stands for an extent: compared by identity."""

    name: list[str]


def paths_of(prompts: list[str], blocks: dict[str, Block]) -> list[list[Piece]]:
    """Every prompt's path in a tree whose nodes are letters, one extent for each node, of just as
    many tokens as a span has to have.
    """
    return [
        [
            Piece(
                blocks.setdefault(prompt[: at + 1], Block([prompt[: at + 1]])),
                at * LEAST_SPAN,
                (at + 1) * LEAST_SPAN,
            )
            for at in range(len(prompt))
        ]
        for prompt in prompts
    ]


@given(st.lists(st.text("ab", max_size=6), min_size=1, max_size=8), st.integers(0, 6))
def test_each_row_is_served_up_to_its_reach_by_spans_without_a_gap(
    prompts: list[str], limit: int
) -> None:
    sharing = share(paths_of(prompts, {}), limit)
    assert len(sharing.spans) <= limit
    for row, prompt in enumerate(prompts):
        served = sorted(
            (span.piece.start, span.piece.stop) for span in sharing.spans if row in span.rows
        )
        assert [start for start, _ in served] == [0, *(stop for _, stop in served)][: len(served)]
        assert sharing.reach[row] == (served[-1][1] if served else 0)
        assert sharing.reach[row] <= LEAST_SPAN * len(prompt)
    for span in sharing.spans:
        beginning = span.piece.extent.name[0]
        assert list(span.rows) == [
            row for row, prompt in enumerate(prompts) if prompt.startswith(beginning)
        ]


@given(st.lists(st.text("ab", max_size=6), min_size=1, max_size=8))
def test_with_room_for_all_every_row_is_served_to_its_end(prompts: list[str]) -> None:
    assert share(paths_of(prompts, {}), 1 << 20).reach == [
        LEAST_SPAN * len(prompt) for prompt in prompts
    ]


def test_an_extent_is_cut_where_rows_part_and_joined_where_they_do_not() -> None:
    extent, other = Block(["whole"]), Block(["other"])
    split = [Piece(extent, 0, 40), Piece(extent, 40, 60)]
    sharing = share([[Piece(extent, 0, 60)], [*split, Piece(other, 60, 80)], [split[0]]], 8)
    assert {(span.piece.start, span.piece.stop, span.rows) for span in sharing.spans} == {
        (0, 40, (0, 1, 2)),
        (40, 60, (0, 1)),
        (60, 80, (1,)),
    }
    assert len(share([split, split], 8).spans) == 1


def test_what_saves_most_comes_first_with_all_before_it() -> None:
    start, long, short = Block(["start"]), Block(["long"]), Block(["short"])
    shared = Piece(start, 0, 20)
    sharing = share([[shared, Piece(long, 20, 900)], [shared, Piece(short, 20, 50)]], 2)
    assert sharing.reach == [900, 20]


def test_a_few_tokens_are_no_span_unless_a_longer_one_needs_them() -> None:
    start, few, long = Block(["start"]), Block(["few"]), Block(["long"])
    pieces = [Piece(start, 0, 900), Piece(few, 900, 903), Piece(long, 903, 2000)]
    assert share([pieces[:2]] * 3, 8).reach == [900] * 3
    assert share([pieces] * 3, 8).reach == [2000] * 3


def test_a_row_reads_no_span_behind_a_part_that_no_span_serves() -> None:
    """Two copies of the same tokens lead to the same part: only one of the ways is taken."""
    whole, copy = Block(["whole"]), Block(["copy"])
    paths = [[Piece(whole, 0, 40)], [Piece(copy, 0, 20), Piece(whole, 20, 40)]]
    sharing = share(paths, 2)
    for span in sharing.spans:
        assert all(sharing.reach[row] >= span.piece.stop for row in span.rows)
    assert sorted(sharing.reach) == [0, 40]
