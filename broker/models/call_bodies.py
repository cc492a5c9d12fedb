"""What may stand in a call, syntax by syntax, as rules of a grammar.

JSON is written to the schema of the arguments in the families `json_tools`, `kimi_k2`, `kimi_k3`
and `mistral`, and to the schema of each argument in `pythonic`. The families that put arguments
between marks (`qwen3_coder`, `glm47`, `laguna`, `longcat`, `minimax_m2`, `minicpm5`, `muse_spark`)
have the names of arguments, required ones all, in the order of the schema; numbers, booleans,
arrays and objects keep to theirs, and strings to their `enum`; other values are free. `gemma4` and
`function_gemma` have the names of tools, arguments are free. Of any other family only the mark that
begins a call is known.
"""

from collections.abc import Callable, Sequence

from ..messages import Tool
from .call_layouts import LAYOUTS, laid_out
from .lark import TEXT, Lark
from .marker import quoted
from .schemas import arguments_rule, properties
from .tool_syntax import ToolSyntax

QUOTES = {"gemma4": '<|"|>', "function_gemma": "<escape>"}


def section(syntax: ToolSyntax, lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
    """What stands behind the mark that begins a call, up to the one that ends it.

    In some families that is several calls, if `parallel`.
    """
    make = _FAMILIES.get(syntax.family)
    if syntax.family in LAYOUTS:
        rules = [laid_out(lark, LAYOUTS[syntax.family], tool) for tool in tools]
    elif make is not None:
        rules = [make(lark, tool) for tool in tools]
    else:
        return ""
    one = lark.new_rule(" | ".join(rules))
    return _SECTIONS.get(syntax.family, _alone)(lark, one, parallel)


def end_of_call(syntax: ToolSyntax, lark: Lark) -> str:
    """The end of a call: its mark, behind free text where the syntax is not known."""
    if not syntax.end:
        return "" if syntax.family in _FAMILIES else TEXT
    if syntax.family in QUOTES:
        quote = lark.mark(QUOTES[syntax.family])
        free = f"({TEXT} {quote})*" if quote.startswith("<") else ""
        return f"{free} {lark.until(syntax.end)}"
    if syntax.family in _FAMILIES or syntax.family in LAYOUTS:
        return lark.mark(syntax.end)
    return lark.until(syntax.end)


def _json(lark: Lark, tool: Tool) -> str:
    name = quoted(quoted(tool.name))
    colon, comma = 'WS? ":" WS?', 'WS? "," WS?'
    key, value = quoted('"name"'), quoted('"arguments"')
    return lark.new_rule(
        f'WS? "{{" WS? {key} {colon} {name} {comma} {value} {colon} {arguments_rule(tool)} '
        'WS? "}" WS?'
    )


def _mistral(lark: Lark, tool: Tool) -> str:
    return lark.new_rule(f"{quoted(tool.name)} {lark.mark('[ARGS]')} {arguments_rule(tool)}")


def _kimi_k2(lark: Lark, tool: Tool) -> str:
    begin = lark.mark(f"<|tool_call_begin|>functions.{tool.name}:")
    arguments = f"{lark.mark('<|tool_call_argument_begin|>')} {arguments_rule(tool)}"
    return lark.new_rule(f"{begin} NUMBER {arguments} {lark.mark('<|tool_call_end|>')}")


def _kimi_k3(lark: Lark, tool: Tool) -> str:
    begin = lark.mark(f'<|open|>call tool={quoted(tool.name)} index="')
    opened = lark.mark('"<|sep|><|open|>json type="object"<|sep|>')
    closed = lark.mark("<|close|>json<|sep|><|close|>call<|sep|>")
    return lark.new_rule(f"{begin} NUMBER {opened} {arguments_rule(tool)} {closed}")


def _pythonic(lark: Lark, tool: Tool) -> str:
    """With the required arguments first, so that only what follows has a comma to begin with."""
    found = properties(tool)
    required = [f"{quoted(f'{each.name}=')} {each.rule}" for each in found if each.is_required]
    optional = [f"{quoted(f'{each.name}=')} {each.rule}" for each in found if not each.is_required]
    comma = '", "'
    first = f" {comma} ".join(required)
    if required:
        said = " ".join([first, *(f"({comma} {each})?" for each in optional)])
    else:
        ways = [
            " ".join([each, *(f"({comma} {later})?" for later in optional[at + 1 :])])
            for at, each in enumerate(optional)
        ]
        said = f"({' | '.join(ways)})?" if ways else ""
    return lark.new_rule(f'{quoted(f"{tool.name}(")} {said} ")"')


def _named(lark: Lark, tool: Tool) -> str:
    return lark.new_rule(quoted(f"call:{tool.name}{{"))


def _alone(lark: Lark, one: str, parallel: bool) -> str:
    return one


def _in_a_row(lark: Lark, one: str, parallel: bool) -> str:
    return f"{one} (WS? {one})* WS?" if parallel else f"{one} WS?"


def _in_a_list(lark: Lark, one: str, parallel: bool) -> str:
    return f'"[" {one} (", " {one})* "]"' if parallel else f'"[" {one} "]"'


_FAMILIES: dict[str, Callable[[Lark, Tool], str]] = {
    "json_tools": _json,
    "mistral": _mistral,
    "mistral_list": _json,
    "kimi_k2": _kimi_k2,
    "kimi_k3": _kimi_k3,
    "pythonic": _pythonic,
    "gemma4": _named,
    "function_gemma": _named,
}
_SECTIONS: dict[str, Callable[[Lark, str, bool], str]] = {
    "mistral_list": _in_a_list,
    "kimi_k2": _in_a_row,
    "kimi_k3": _in_a_row,
    "pythonic": _in_a_list,
    "minimax_m2": _in_a_row,
    "muse_spark": _in_a_row,
}
