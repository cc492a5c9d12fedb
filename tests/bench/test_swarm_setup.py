"""Prompts for `bench.swarm`: new every time, the same for the same seed, counted as a tree."""

from hypothesis import given
from hypothesis import strategies as st

from bench.swarm_setup import Supply, distinct_tokens

PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=6)


@given(PROMPTS)
def test_distinct_tokens_are_the_nodes_of_a_tree(prompts: list[list[int]]) -> None:
    prefixes = {tuple(prompt[: at + 1]) for prompt in prompts for at in range(len(prompt))}
    assert distinct_tokens(prompts) == len(prefixes)


def test_a_supply_repeats_for_its_seed_and_never_repeats_itself() -> None:
    ours, theirs = Supply(1000, 8), Supply(1000, 8)
    first, second = ours.prompts(2, 16, 4), ours.prompts(2, 16, 4)
    assert [first, second] == [theirs.prompts(2, 16, 4), theirs.prompts(2, 16, 4)]
    assert first[0][:16] == first[1][:16] != second[0][:16]
    assert first[0][16:] != first[1][16:]
    assert all(100 <= token < 900 for prompt in first for token in prompt)
