"""Grammars that keep a model's output to calls of the tools it was given."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..grammar import Grammar
from ..messages import Tool, ToolChoice
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
    return None
