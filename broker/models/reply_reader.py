"""What a model's output says, while it comes: text, reasoning and tool calls."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from .tool_syntax import CallPiece as CallPiece
from .tool_syntax import ThinkTags, ToolSyntax, parse_calls

State = Literal["normal", "reasoning", "tool", "header"]


class TextPiece(NamedTuple):
    """Text for the user."""

    text: str


class ReasoningPiece(NamedTuple):
    """What the model thinks before it answers."""

    text: str


Piece = TextPiece | ReasoningPiece | CallPiece


class Marks(NamedTuple):
    """Where the output passes from one state to another: for each state the marks that end it and
    what follows them; what stands in the state `header` is not for the user."""

    transitions: dict[str, tuple[tuple[str, State], ...]]
    start: State = "normal"


class ReplyReader:
    """Reads one reply. Its pieces are the same however the text is cut.

    Marks are never part of a piece; as much of the end is held back as could begin one, and white
    space, until it is known whether it separates. Between text, reasoning and calls it is left out,
    within them it stays. A call that is malformed, that never ends, or that names none of `tools`
    comes as text, as the model wrote it, and counts in `malformed`.
    """

    def __init__(
        self, marks: Marks, syntax: ToolSyntax | None = None, tools: Sequence[dict[str, Any]] = ()
    ) -> None:
        self.malformed = 0
        self._marks = marks.transitions
        self._state: State = marks.start
        self._syntax = syntax
        self._tools = tools
        self._waiting = ""
        self._space = ""
        self._call = ""
        self._is_fresh = marks.start != "normal"

    def feed(self, text: str) -> list[Piece]:
        """What is known of the reply now that `text` has come, and was not before."""
        self._waiting += text
        pieces: list[Piece] = []
        while (found := self._next_mark()) is not None:
            place, mark, state = found
            before, self._waiting = self._waiting[:place], self._waiting[place + len(mark) :]
            self._take(before, pieces)
            self._pass(mark, state, pieces)
        self._take(self._ready(), pieces)
        return pieces

    def finish(self) -> list[Piece]:
        """What is left when the output is complete."""
        pieces: list[Piece] = []
        self._take(self._waiting, pieces)
        self._waiting = ""
        if self._state == "tool":
            self._end_call("", pieces)
        if self._space and not self._is_fresh:
            self._emit(self._space, pieces)
        self._space = ""
        return pieces

    def _next_mark(self) -> tuple[int, str, State] | None:
        """The first mark that is complete; of those at one place the longest."""
        found = [
            (self._waiting.find(mark), -len(mark), mark, state)
            for mark, state in self._marks.get(self._state, ())
        ]
        found = [each for each in found if each[0] >= 0]
        if not found:
            return None
        place, _, mark, state = min(found)
        return place, mark, state

    def _ready(self) -> str:
        """What cannot be part of a mark any more, taken from what waits."""
        marks = [mark for mark, _ in self._marks.get(self._state, ())]
        held = max((_overlap(self._waiting, mark) for mark in marks), default=0)
        cut = len(self._waiting) - held
        ready, self._waiting = self._waiting[:cut], self._waiting[cut:]
        return ready

    def _take(self, text: str, pieces: list[Piece]) -> None:
        """Text of the present state; white space at its end waits for what follows."""
        if self._state == "header":
            return
        if self._state == "tool":
            self._call += text
            return
        if self._is_fresh:
            text = text.lstrip()
        if not text or not self._marks.get(self._state):
            self._emit(text, pieces)
            return
        body = text.rstrip()
        if body:
            self._is_fresh = False
            self._emit(self._space + body, pieces)
            self._space = ""
        self._space += text[len(body) :]

    def _pass(self, mark: str, state: State, pieces: list[Piece]) -> None:
        """Go from the present state to the next."""
        if self._state == "tool":
            self._end_call(mark, pieces)
            self._state = state
            return
        if state == "tool":
            self._call = ""
        else:
            self._space, self._is_fresh = "", True
        self._state = state

    def _end_call(self, mark: str, pieces: list[Piece]) -> None:
        assert self._syntax is not None
        self._state = "normal"
        is_complete = bool(mark) or not self._syntax.end
        calls = parse_calls(self._syntax, self._call, self._tools) if is_complete else None
        if calls is None:
            self.malformed += 1
            self._emit(self._space + self._syntax.start + self._call + mark, pieces)
            self._space, self._is_fresh = "", False
        else:
            pieces += calls
            self._space, self._is_fresh = "", True
        self._call = ""

    def _emit(self, text: str, pieces: list[Piece]) -> None:
        if not text:
            return
        kind = ReasoningPiece if self._state == "reasoning" else TextPiece
        last = pieces[-1] if pieces else None
        if isinstance(last, kind):
            pieces[-1] = kind(last.text + text)
        else:
            pieces.append(kind(text))


def marks_of(
    syntax: ToolSyntax | None,
    think: ThinkTags | None,
    *,
    start: State = "normal",
    extra: dict[str, list[tuple[str, State]]] | None = None,
    dropped: Sequence[str] = (),
) -> Marks:
    """The marks of a model with a tool syntax, reasoning, `extra` transitions of its own, and marks
    that are `dropped` from text."""
    marks: dict[str, list[tuple[str, State]]] = {"normal": [], "reasoning": []}
    if think is not None:
        marks["normal"].append((think.start, "reasoning"))
        marks["reasoning"].append((think.end, "normal"))
    for state, edges in (extra or {}).items():
        marks.setdefault(state, []).extend(edges)
    marks["normal"] += [(mark, "normal") for mark in dropped]
    if syntax is not None:
        for state in marks:
            marks[state] = [edge for edge in marks[state] if edge[0] != syntax.start]
            if state != "tool":
                marks[state].append((syntax.start, "tool"))
        marks["tool"] = [(syntax.end, "normal")] if syntax.end else []
    else:
        marks = {
            state: [edge for edge in edges if edge[1] != "tool"] for state, edges in marks.items()
        }
    return Marks({state: tuple(edges) for state, edges in marks.items()}, start)


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` could begin a mark that is not complete yet."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
