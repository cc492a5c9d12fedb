"""Streaming text: pieces add up, and nothing of a stop string gets out."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mlx_swarm.broker.engine.text import TextStream


class Characters:
    """A detokenizer whose tokens are code points."""

    def __init__(self) -> None:
        self.last_segment = ""

    def add_token(self, token: int) -> None:
        self.last_segment = chr(token)

    def finalize(self) -> None:
        self.last_segment = ""


def _stream(text: str, stops: list[str]) -> tuple[list[str], TextStream]:
    stream = TextStream(Characters(), stops)
    pieces = []
    for character in text:
        pieces.append(stream.add(ord(character)))
        if stream.stopped:
            break
    pieces.append(stream.finish())
    return pieces, stream


def test_text_without_stop_strings_passes_at_once() -> None:
    pieces, stream = _stream("hello", [])
    assert pieces == ["h", "e", "l", "l", "o", ""]
    assert stream.text == "hello"


def test_a_stop_string_that_spans_tokens_is_cut_and_never_shown() -> None:
    pieces, stream = _stream("one END two", ["END"])
    assert "".join(pieces) == stream.text == "one "
    assert stream.stopped


def test_what_only_looked_like_a_stop_string_comes_out_in_the_end() -> None:
    pieces, stream = _stream("an EN", ["END"])
    assert pieces[-1] == "EN"
    assert stream.text == "an EN"
    assert not stream.stopped


def test_the_stop_string_that_starts_first_wins() -> None:
    assert _stream("abcdef", ["cdef", "de"])[1].text == "abc"


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_pieces_add_up_to_the_text_before_the_first_stop_string(
    text: str, stops: list[str]
) -> None:
    pieces, stream = _stream(text, stops)
    ends = [end for end in range(len(text) + 1) if any(stop in text[:end] for stop in stops)]
    read = text[: ends[0]] if ends else text
    starts = [read.find(stop) for stop in stops if stop in read]
    assert "".join(pieces) == stream.text == read[: min(starts, default=len(read))]
    assert stream.stopped == bool(ends)
    shown = ["".join(pieces[:count]) for count in range(len(pieces) + 1)]
    assert all(later.startswith(earlier) for earlier, later in pairwise(shown))


def test_stop_strings_end_nothing_before_the_minimum() -> None:
    stream = TextStream(Characters(), ["ab"], min_tokens=3)
    assert [stream.add(ord(each)) for each in "abab"] == ["a", "b", "a", "b"]
    assert [stream.add(ord(each)) for each in "cab"] == ["c", "", ""]
    assert stream.stopped
    assert stream.text == "ababc"


def test_what_is_held_back_at_an_end_before_the_minimum_is_text() -> None:
    stream = TextStream(Characters(), ["ab"], min_tokens=3)
    assert stream.add(ord("a")) + stream.finish() == "a"
    assert not stream.stopped
