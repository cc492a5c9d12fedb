"""The marks in a model's output, and tool calls as its parser reads them."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools

from .generic_tools import END, START


class CallPiece(NamedTuple):
    """A tool call; `arguments` is the JSON text of an object."""

    name: str
    arguments: str


class ToolSyntax(NamedTuple):
    """How a model writes calls: between `start` and `end` (to the end of the output where that is
    empty), in what `parse` of `family` reads, the name of a module of mlx_lm.tool_parsers."""

    start: str
    end: str
    parse: Callable[[str, Any], Any]
    family: str


class ThinkTags(NamedTuple):
    """What a model writes around its reasoning."""

    start: str
    end: str


# Some models of the family give a call's id, which its parser in mlx-lm takes for the name.
CALL_ID = re.compile(r"\[CALL_ID\][\w-]+(?=\s*\[ARGS\])")
LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
GENERIC = ToolSyntax(START, END, json_tools.parse_tool_call, "json_tools")


def tool_syntax(tokenizer: TokenizerWrapper) -> ToolSyntax | None:
    """The syntax that mlx-lm knows for a tokenizer's model."""
    if not tokenizer.has_tool_calling or tokenizer.tool_parser is None:
        return None
    parse = tokenizer.tool_parser
    family = parse.__module__.rpartition(".")[2]
    return ToolSyntax(tokenizer.tool_call_start, tokenizer.tool_call_end or "", parse, family)


def think_tags(tokenizer: TokenizerWrapper) -> ThinkTags | None:
    """What mlx-lm takes for the marks of reasoning."""
    if not tokenizer.has_thinking:
        return None
    return ThinkTags(tokenizer.think_start, tokenizer.think_end)


def parse_calls(
    syntax: ToolSyntax, text: str, tools: Sequence[dict[str, Any]]
) -> list[CallPiece] | None:
    """The calls in what stands between the tags, or None for what is no call of these tools.

    `tools` are in the form of the OpenAI API.
    """
    names = {tool["function"]["name"] for tool in tools}
    if syntax.family == "mistral":
        text = CALL_ID.sub("", text)
    try:
        parsed = syntax.parse(text, list(tools))
        found = parsed if isinstance(parsed, list) else [parsed]
        calls = [_call(each) for each in found]
    except Exception:  # the parsers raise whatever the first odd character leads to
        return None
    return calls if calls and all(call.name in names for call in calls) else None


def json_text(value: Any, *, allow_nan: bool = True) -> str:
    """A value as JSON that UTF-8 can hold: without halves of surrogate pairs, which JSON may have
    as \\ud800. Without `allow_nan` raises `ValueError` for what is not finite."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=allow_nan)
    return LONE_SURROGATE.sub("\ufffd", text)


def _call(parsed: Any) -> CallPiece:
    """Raises `ValueError`, `TypeError` or `KeyError` for what is no call."""
    name = parsed["name"]
    arguments = parsed.get("arguments", parsed.get("parameters"))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise ValueError("a call has a name and an object of arguments")
    return CallPiece(name, json_text(arguments, allow_nan=False))
