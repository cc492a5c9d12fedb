"""Grammars that keep a model's output to calls of the tools it was given.

What stands in a call is as strict as its syntax can be said in Lark (see `call_bodies`); around it
are text and reasoning, which are free.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ..grammar import Grammar
from ..messages import NamedTool, Tool, ToolChoice
from .call_bodies import end_of_call, section
from .lark import TEXT, Lark, json_rule
from .marker import Marker
from .tool_syntax import ThinkTags, ToolSyntax


def tool_grammar(
    syntax: ToolSyntax,
    marker: Marker,
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    parallel: bool,
    schema: Mapping[str, Any] | None,
    think: ThinkTags | None,
    in_reasoning: bool,
) -> Grammar | None:
    """See `ChatFormat.grammar`."""
    named = choice.name if isinstance(choice, NamedTool) else None
    callable_ = [tool for tool in tools if named in (None, tool.name)]
    if choice == "none" or not callable_:
        callable_ = []
        if schema is None:
            return None
        if think is None:
            return Grammar(json_schema=schema)
    lark = Lark(marker)
    answer = None if schema is None else json_rule(schema, lenient=False)
    output = _Output(lark, syntax, section(syntax, lark, callable_, parallel), parallel)
    if not callable_:
        said = str(answer)
    elif choice != "auto":
        said = output.calls()
    elif answer is not None:
        said = f"{output.calls()} | {answer}"
    else:
        said = output.text_and_calls()
    lark.rule("said", said)
    lark.rule("start", f"{_reasoning(lark, think, in_reasoning)} said")
    return Grammar(lark=lark.text())


class _Output:
    """What may be said, in terms of the rule of one call, or of one section of calls."""

    def __init__(self, lark: Lark, syntax: ToolSyntax, body: str, parallel: bool) -> None:
        self._lark = lark
        self._syntax = syntax
        self._parallel = parallel
        self._lark.rule("body", f"{body} {end_of_call(syntax, lark)}".strip())

    def calls(self) -> str:
        """Nothing but calls."""
        start = self._lark.mark(self._syntax.start)
        self._lark.rule("call", f"{start} body")
        return "call (WS? call)*" if self._parallel else "call"

    def text_and_calls(self) -> str:
        """Text in which calls may stand."""
        self._lark.rule("call", " | ".join(f"{each} body" for each in self._begun()))
        if not self._parallel:
            return f"{TEXT} | call"
        if self._syntax.end:
            return f"call* {TEXT}"
        again = self._lark.mark(self._syntax.start)
        return f"{TEXT} | call ({again} body)*"

    def _begun(self) -> list[str]:
        """Text up to a call's mark, which may be a token of its own or be spelt."""
        begun = [self._lark.until(self._syntax.start)]
        if self._lark.is_token(self._syntax.start):
            begun.append(self._lark.until_spelt(self._syntax.start))
        return begun


def _reasoning(lark: Lark, think: ThinkTags | None, in_reasoning: bool) -> str:
    if think is None:
        return "WS?"
    lark.rule("thought", lark.until(think.end))
    if in_reasoning:
        return "thought WS?"
    return f"WS? ({lark.mark(think.start)} thought WS?)?"
