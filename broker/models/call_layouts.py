"""Calls that have each argument between marks, as rules of a grammar."""

from typing import NamedTuple

from ..messages import Tool
from .lark import Lark
from .marker import quoted
from .schemas import Property, has_any_arguments, properties


class Layout(NamedTuple):
    """A call with each argument between marks."""

    before_name: str
    after_name: str
    before_key: str
    after_key: str
    after_value: str
    after_all: str


LAYOUTS = {
    "qwen3_coder": Layout(
        "\n<function=", ">\n", "<parameter=", ">\n", "\n</parameter>\n", "</function>\n"
    ),
    "glm47": Layout("", "\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", ""),
    "laguna": Layout("", "\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", ""),
    "longcat": Layout(
        "",
        "\n",
        "<longcat_arg_key>",
        "</longcat_arg_key>\n<longcat_arg_value>",
        "</longcat_arg_value>\n",
        "",
    ),
    "minimax_m2": Layout(
        '\n<invoke name="', '">\n', '<parameter name="', '">', "</parameter>\n", "</invoke>\n"
    ),
    "minicpm5": Layout('"', '">', '<param name="', '">', "</param>", ""),
    "muse_spark": Layout(
        '\n<atem:invoke name="',
        '">\n',
        '<atem:parameter name="',
        '">',
        "</atem:parameter>\n",
        "</atem:invoke>\n",
    ),
}


def laid_out(lark: Lark, layout: Layout, tool: Tool) -> str:
    """A call of one tool."""
    found = properties(tool)
    begin = lark.mark(f"{layout.before_name}{tool.name}{layout.after_name}")
    arguments = [_argument(lark, layout, each) for each in found]
    if not found and has_any_arguments(tool):
        value = lark.until(layout.after_value)
        named = f"{lark.mark(layout.before_key)} KEY {lark.mark(layout.after_key)}"
        arguments = [f"({named} {value})*"]
    return lark.new_rule(" ".join([begin, *arguments, lark.mark(layout.after_all)]))


def _argument(lark: Lark, layout: Layout, argument: Property) -> str:
    begin = lark.mark(f"{layout.before_key}{argument.name}{layout.after_key}")
    if argument.options:
        options = " | ".join(quoted(option) for option in argument.options)
        value = f"({options}) {lark.mark(layout.after_value)}"
    elif argument.is_json:
        value = f"{argument.rule} {lark.mark(layout.after_value)}"
    else:
        value = lark.until(layout.after_value)
    rule = lark.new_rule(f"{begin} {value}")
    return rule if argument.is_required else f"{rule}?"
